"""Builds the documentation as a site, with Sphinx: the pages of docs/, README, CONTRIBUTING, CHANGELOG, and the API.

    make docs                               # writes build/site/index.html; a warning is an error
    python tools/build_docs.py --help

The pages are read on GitHub, too, where links are relative to a file's own place. This script copies them to build/docs
in the layout of the site and rewrites the links; a link to any other file of the repository gets a copy of that file.
The API pages come from the docstrings, so the package must be importable.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from pathlib import Path

from example_pages import TITLES

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"

# Pages of the site that are not in docs/, or have another name there.
MOVED = {
    "README.md": "index.md",
    "docs/README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/results/README.md": "measurements.md",
}

# API pages: title, introduction, and the modules with their public names; no names: all of `__all__`.
API: dict[str, tuple[str, str, dict[str, tuple[str, ...]]]] = {
    "ops": (
        "Ops",
        "Functions of ``cuda_ext``: products with fused epilogues, and flash attention.",
        {
            "cuda_ext": (
                "gemm",
                "linear",
                "gated_linear",
                "mlp",
                "gated_mlp",
                "grouped_mm",
                "scaled_mm",
                "scaled_grouped_mm",
                "mixture_of_experts",
                "gemm_plan",
                "batch_invariant",
                "attention_plan",
                "BlockMask",
                "flash_attention",
                "flash_attention_varlen",
                "flash_attention_with_kvcache",
                "merge_attention",
                "linear_cross_entropy",
                "linear_log_prob",
                "patch",
                "unpatch",
            ),
        },
    ),
    "fp8": ("FP8", "``cuda_ext.fp8``: quantisation, and linear layers that train in FP8.", {"cuda_ext.fp8": ()}),
    "tuning": ("Tuning", "``cuda_ext.tuning``: measured plans of products.", {"cuda_ext.tuning": ()}),
    "nn": ("Modules", "Modules of ``cuda_ext.nn``.", {"cuda_ext.nn": ()}),
    "distributed": ("Data parallelism", "``cuda_ext.distributed``.", {"cuda_ext.distributed": ()}),
    "context_parallel": (
        "Context parallelism",
        "``cuda_ext.distributed.context_parallel``: attention over sequences that ranks share.",
        {"cuda_ext.distributed.context_parallel": ()},
    ),
    "bucket": ("Buckets", "``cuda_ext.bucket``: many tensors in one flat buffer.", {"cuda_ext.bucket": ()}),
    "compat": (
        "flash-attn's functions",
        "``cuda_ext.compat``: the functions of the flash-attn package, with its arguments.",
        {
            "cuda_ext.compat": ("install", "uninstall"),
            "cuda_ext.compat.flash_attn": (),
            "cuda_ext.compat.flash_attn.bert_padding": (),
            "cuda_ext.compat.flash_attn.layers.rotary": (),
            "cuda_ext.compat.flash_attn_interface": (),
        },
    ),
    "testing": ("Testing", "``cuda_ext.testing``: references, tolerances, the emulator.", {"cuda_ext.testing": ()}),
    "integrations": (
        "Integrations",
        "``cuda_ext.integrations``: models of other libraries on these ops.",
        {
            "cuda_ext.integrations.transformers": (),
            "cuda_ext.integrations.sdpa": (),
            "cuda_ext.integrations.flex": (),
            "cuda_ext.integrations.linear_cross_entropy": (),
            "cuda_ext.integrations.onnx": (),
        },
    ),
    "dev": ("Builds and reports", "``cuda_ext.dev`` and ``cuda_ext.info``.", {"cuda_ext.dev": (), "cuda_ext.info": ()}),
}

CONTENTS = {
    "Use": (
        "overview",
        "install",
        "gemm_plan",
        "experts",
        "fp8",
        "masks",
        "context_parallel",
        "context_plan",
        "distributed",
        "buckets",
        "faults",
        "support",
        "benchmarks",
        "measurements",
        "changelog",
    ),
    "Existing models": ("transformers", "sdpa", "flex", "patch", "loss", "generation", "export"),
    "Examples": tuple(f"examples/{name}" for name in TITLES),
    "API": tuple(f"api/{name}" for name in API),
    "Contribute": ("contributing", "glossary", "architecture", "emulator", "gpu-check", "gpu"),
    "Inside the kernels": (
        "kernels",
        "model",
        "GEMM, step by step <ladder_gemm>",
        "Attention, step by step <ladder_attention>",
        "Buckets, step by step <ladder_bucket>",
    ),
}

LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def page_of(source: Path) -> Path:
    """Where a file of the repository lies in build/docs."""
    name = source.relative_to(ROOT).as_posix()
    return PAGES / MOVED.get(name, name.removeprefix("docs/"))


def with_links_of_the_site(source: Path) -> str:
    """The text of a page, its links relative to its place on the site. Copies the files that it links to."""

    def moved(match: re.Match[str]) -> str:
        path, mark, anchor = match[2].partition("#")
        if not path or "://" in match[2]:
            return match[0]
        target = (source.parent / path).resolve()
        place = page_of(target)
        if target.is_file() and target.suffix != ".md":
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, place)
        return match[1] + os.path.relpath(place, page_of(source).parent) + mark + anchor + match[3]

    return LINK.sub(moved, source.read_text())


def api_page(title: str, introduction: str, modules: dict[str, tuple[str, ...]]) -> str:
    parts = [title, "=" * len(title), "", introduction, ""]
    for module, names in modules.items():
        parts += [f".. autofunction:: {module}.{name}\n" for name in names] or [
            f".. automodule:: {module}\n   :members:\n"
        ]
    return "\n".join(parts)


def contents() -> str:
    """The menu at the side, as the home page has to name it."""
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:titlesonly:\n:caption: {caption}\n" + "\n".join(pages) + "\n```\n"
        for caption, pages in CONTENTS.items()
    )


def write_pages() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    for source in sorted({*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in MOVED)}):
        page = page_of(source)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(with_links_of_the_site(source) + (contents() if page.name == "index.md" else ""))
    (PAGES / "api").mkdir()
    for name, described in API.items():
        (PAGES / "api" / f"{name}.rst").write_text(api_page(*described))


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds the documentation site from docs/ and the docstrings.")
    parser.add_argument("--out", type=Path, default=SITE, help="folder of the site (default: build/site)")
    arguments = parser.parse_args()
    from sphinx.cmd.build import build_main

    write_pages()
    options = ["-q", "--fail-on-warning", "--keep-going", "-b", "html", "-c", str(ROOT / "docs")]
    failed = build_main([*options, str(PAGES), str(arguments.out)])
    if not failed:
        print(f"open {arguments.out / 'index.html'}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
