from tests.public_api import lines, lines_of_file


def test_the_public_api_is_the_one_written_down() -> None:
    """A change that is meant: python -m tests.public_api, and the changelog says it."""
    assert lines() == lines_of_file()
