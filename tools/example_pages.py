"""Runs the short programs of examples/ and writes a page about each into docs/examples, with its output and plot.

    python tools/example_pages.py                       # all; about ten minutes
    python tools/example_pages.py vit_timm fsdp2

A page consists of the program's docstring, the command, what it printed, the plot that it wrote, and its source.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES, PAGES = ROOT / "examples", ROOT / "docs" / "examples"

# The programs and their titles. The others in examples/ are modules, and the larger program train_gpt.py.
TITLES = {
    "finetune_transformers": "transformers: a Llama with the Trainer",
    "vit_timm": "timm: a vision transformer",
    "embed_bert": "transformers: sentence embeddings with a pretrained BERT",
    "generate_gpt2": "transformers: text from a GPT-2",
    "train_fp8": "A small GPT in bfloat16 and in FP8",
    "train_moe": "A small mixture of experts in bfloat16 and in FP8",
    "train_packed": "Packed documents, and prompts with answers, with a block mask",
    "write_gpt": "A small GPT writes text with a paged cache",
    "amp_loop": "A plain loop: autocast, accumulation, checkpointing",
    "lightning_training": "Lightning",
    "fsdp2": "FSDP2 with bfloat16",
    "train_long": "A small GPT on long windows that processes share",
}
PROCESSES = {"fsdp2": 2, "train_long": 4}  # of those that torchrun starts
# Lines that say something about this machine or another library, not about the example.
NOISE = (
    "Warning",
    "warn",
    "isinstance(treespec",
    "cls.__new__",
    "OMP_NUM_THREADS",
    "*****",
    "Loading weights",
    "'grad_norm'",
    "'train_runtime'",
)


def command(name: str) -> list[str]:
    file = f"examples/{name}.py"
    if name not in PROCESSES:
        return ["python", file]
    return ["torchrun", "--standalone", "--nproc-per-node", str(PROCESSES[name]), file]


def run(name: str, out: Path) -> str:
    """What the example prints. Raises CalledProcessError if it fails."""
    words = [*command(name), "--out", str(out)]
    words[:1] = [sys.executable, "-m", "torch.distributed.run"] if words[0] == "torchrun" else [sys.executable]
    variables = {
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "110",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        print(done.stdout, file=sys.stderr)
        done.check_returncode()
    # A progress bar rewrites its line: what stays visible is the text after the last carriage return.
    lines = [line.rpartition("\r")[2].rstrip() for line in done.stdout.replace(str(out), "runs").splitlines()]
    return "\n".join(line for line in lines if line and not any(word in line for word in NOISE))


def page(name: str, output: str, plot: bool) -> str:
    described = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())) or ""
    # The usage of the docstring is shown as the command.
    text = "\n".join(line for line in described.splitlines() if not line.startswith("    "))
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    parts = [f"# {TITLES[name]}", text, f"```sh\n{' '.join(command(name))}        # --help lists the options\n```"]
    parts += ["It printed, on 2 cores without a GPU:", f"```text\n{output}\n```"]
    if plot:
        parts.append(f"![loss by step]({name}.png)")
    parts.append(f"The program: [examples/{name}.py](../../examples/{name}.py)")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all, {', '.join(TITLES)}")
    names = parser.parse_args().names or list(TITLES)
    if unknown := set(names) - set(TITLES):
        parser.error(f"no example {', '.join(sorted(unknown))}; there are {', '.join(TITLES)}")
    PAGES.mkdir(exist_ok=True)
    for number, name in enumerate(names, start=1):
        print(f"{number}/{len(names)} {name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            output = run(name, Path(folder))
            plot = Path(folder, f"{name}.png")
            if plot.exists():
                shutil.copyfile(plot, PAGES / plot.name)
            (PAGES / f"{name}.md").write_text(page(name, output, plot.exists()))


if __name__ == "__main__":
    main()
