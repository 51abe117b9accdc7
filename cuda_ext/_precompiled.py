"""The C++ compiler of a build: a script that first precompiles the headers of PyTorch, which take longer to read than
an op takes to compile.

gcc uses `torch_headers.h.gch` in place of `torch_headers.h` if it finds it first and the flags are the same. Only the
compiler's command line shows them, so the script makes it with the flags of the first source that needs it. A source
that comes while another process makes it does without. If making it fails, all sources do.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

HEADER = "ops/torch_headers.h"
SCRIPT = """\
#!/bin/sh
# Written by the build: runs the C++ compiler, for ops with a precompiled header.
header={header}
made={made}

make_header() {{  # with the flags of the source, but no other files
  for argument; do
    shift
    case $previous in -MF | -o) previous=; continue ;; esac
    previous=$argument
    case $argument in -MF | -o | -MD | -MMD | -c | *.cpp) ;; *) set -- "$@" "$argument" ;; esac
  done
  {compiler} "$@" -w -x c++-header "$header" -o "$made.new" && mv "$made.new" "$made"
}}

case "$*" in *" -c "{ops}*)
  if [ ! -e "$made" ] && mkdir "$made.lock"; then (make_header "$@"); fi >/dev/null 2>&1 ;;
esac
exec {compiler} "$@"
"""


def prepare(folder: Path, csrc: Path) -> Path:
    """Writes the script into a build folder and returns it; `folder/include` must come before `csrc` in the flags."""
    header, made = csrc / HEADER, folder / "include" / f"{HEADER}.gch"
    made.parent.mkdir(parents=True, exist_ok=True)
    if made.exists() and (not header.exists() or header.stat().st_mtime > made.stat().st_mtime):
        made.unlink()
    shutil.rmtree(f"{made}.lock", ignore_errors=True)
    script = folder / "c++"
    text = SCRIPT.format(
        header=shlex.quote(str(header)),
        made=shlex.quote(str(made)),
        ops=shlex.quote(f"{header.parent}/"),
        compiler=os.environ.get("CXX", "c++"),
    )
    if not script.exists() or script.read_text() != text:
        script.write_text(text)
    script.chmod(0o755)
    return script
