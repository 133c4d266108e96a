"""The mutants of tests/support/mutants.py: what a mutation trial plants."""

import ast

from tests.support.mutants import AREAS, ROOT, mutants


def test_mutants_are_drawn_by_their_seed_and_differ_from_the_code():
    found = mutants(seed=1, count=20)
    assert found == mutants(seed=1, count=20) and {mutant["area"] for mutant in found} == {*AREAS}
    for mutant in found:
        before = (ROOT / mutant["file"]).read_text()
        assert ast.dump(ast.parse(mutant["text"])) != ast.dump(ast.parse(before)), mutant
        assert len(set(before.splitlines()) ^ set(mutant["text"].splitlines())) < 40, mutant


def test_tests_of_each_area_exist():
    assert all((ROOT / name).is_file() for _, _, names in AREAS.values() for name in names)
