"""Prints what the extra `test` of pyproject.toml requires, without cuda_ext itself: `make test` installs that while the
library compiles."""

from setuptools.config.pyprojecttoml import read_configuration  # type: ignore[import-untyped]

extras = read_configuration("pyproject.toml", expand=False)["project"]["optional-dependencies"]
own = "cuda_ext["  # as in cuda_ext[demo,docs], which stands for what these extras require


def requirements(extra: str) -> list[str]:
    included = [name for each in extras[extra] if each.startswith(own) for name in each[len(own) : -1].split(",")]
    return [each for each in extras[extra] if not each.startswith(own)] + [
        each for name in included for each in requirements(name)
    ]


print(*requirements("test"))
