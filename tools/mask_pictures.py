"""Draws the pictures of docs/masks.md into docs/masks, each from the call beside it.

    python tools/mask_pictures.py           # writes docs/masks/*.svg
    python tools/mask_pictures.py --check   # writes nothing; fails if a picture is not current

The page's programs run first, in order: the calls use their names.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cuda_ext import BlockMask  # noqa: E402

PAGE, PICTURES = ROOT / "docs" / "masks.md", ROOT / "docs" / "masks"
PIXELS = 144  # of the longer side: three columns of a table have to fit
ROW = re.compile(r"^\| !\[[^]]*\]\(masks/(\w+)\.svg\) \| `(.+?)` \|", re.MULTILINE)


def programs(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def calls(text: str) -> dict[str, str]:
    """The call of each picture."""
    return {name: call.replace(r"\|", "|") for name, call in ROW.findall(text)}


def names_of(text: str) -> dict[str, Any]:
    """What the page's programs define. They write into the working directory."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, program in enumerate(programs(text)):
        exec(compile(program, f"masks.md, program {number}", "exec"), names)
    return names


def masks(text: str) -> dict[str, BlockMask]:
    """The mask of each picture."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            names = names_of(text)
        finally:
            os.chdir(before)
    return {name: eval(call, names) for name, call in calls(text).items()}


def picture(mask: BlockMask) -> str:
    """As `BlockMask.plot` draws it, but smaller."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mask.svg")
        mask.plot(path)
        drawn = path.read_text()
    longer = max(mask.seq_lengths)
    height, width = (f"{PIXELS * length / longer:g}" for length in mask.seq_lengths)
    return re.sub(r'width="\S+" height="\S+"', f'width="{width}" height="{height}"', drawn, count=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a picture is not current")
    check = parser.parse_args().check
    drawn = {PICTURES / f"{name}.svg": picture(mask) for name, mask in masks(PAGE.read_text()).items()}
    unused = sorted(set(PICTURES.glob("*.svg")) - set(drawn))
    stale = [path for path, text in drawn.items() if not path.exists() or path.read_text() != text]
    if check and (stale or unused):
        names = ", ".join(path.name for path in stale + unused)
        print(f"not current: {names}; run python tools/mask_pictures.py", file=sys.stderr)
        return 1
    PICTURES.mkdir(exist_ok=True)
    for path in unused:
        path.unlink()
    for path in stale:
        path.write_text(drawn[path])
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
