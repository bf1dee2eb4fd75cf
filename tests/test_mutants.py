"""The lists of tests/mutants follow the code. Whether a test fails with each mutant is seen by running them."""

import pytest
from mutants.run import HERE, ROOT, read


@pytest.mark.parametrize("name", sorted(path.stem for path in HERE.glob("*.txt")))
def test_the_code_of_every_mutant_stands_once_in_its_file(name) -> None:
    for file, _, title, old, _ in read(name):
        assert (ROOT / file).read_text().count(old) == 1, f"{file}, {title}: {old}"


@pytest.mark.parametrize("name", sorted(path.stem for path in HERE.glob("*.txt")))
def test_every_mutant_names_a_test_that_is_there(name) -> None:
    for _, tests, title, _, _ in read(name):
        file, *keywords = tests.split("::")
        source = (ROOT / file).read_text()
        for keyword in keywords:
            assert keyword.split()[0] in source, f"{title}: {tests}"
