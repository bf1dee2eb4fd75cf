"""The lowest versions that are said to work are those that are tested."""

import re
from pathlib import Path


def versions(name: str) -> dict[str, str]:
    """Package -> version, or lowest version."""
    requirements = (Path(__file__).parents[1] / name).read_text()
    return dict(re.findall(r"^([\w-]+)(?:==|>=|~=)([\d.]+)", requirements, re.MULTILINE))


def test_the_lowest_versions_are_those_that_the_requirements_allow() -> None:
    lowest = versions("constraints-lowest.txt")
    for package, version in versions("requirements.txt").items():
        assert package == "torch" or lowest[package] == version
