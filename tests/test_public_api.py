from tests.public_api import FILE, lines


def test_the_public_api_is_the_one_written_down() -> None:
    """A change that is meant: python -m tests.public_api > tests/public_api.txt, and the changelog
    says it."""
    assert list(lines()) == FILE.read_text().splitlines()
