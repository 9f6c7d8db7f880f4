"""The draw sees every kind of text, and is the same for a seed."""

from tests.docs.draw_sentences import draw, of_page, of_source, sentences


def test_sentences_of_a_page() -> None:
    page = (
        "# Title\n\nFirst [one](a.md). Then `x` is it.\n- Item one\n  goes on.\n"
        "- Item two.\n\n```sh\nrun. It now\n```\n\n| a | b |\n|---|---|\n| In a cell. | Other. |\n"
    )
    assert [(each.place, each.text) for each in of_page("p", page) if each.text.strip("-|")] == [
        ("p:3", "First one."),
        ("p:3", "Then `x` is it."),
        ("p:4", "Item one goes on."),
        ("p:6", "Item two."),
        ("p:12", "a"),
        ("p:12", "b"),
        ("p:14", "In a cell."),
        ("p:14", "Other."),
    ]


def test_sentences_of_a_module() -> None:
    source = (
        '"""About it."""\n'
        "def public(a, b):\n"
        '    """Does it. Well.\n\n    Args:\n        a: first.\n        b: second,\n'
        '            longer.\n    """\n'
        '    raise ValueError(f"{a} is bad: use another")\n'
        "def _private():\n"
        '    """Not this."""\n'
        'add("--x", help="an option")\n'
    )
    texts = {each.text for each in of_source("m", source)}
    assert texts == {
        "About it.",
        "Does it.",
        "Well.",
        "a: first.",
        "b: second, longer.",
        "{a} is bad: use another",
        "an option",
    }


def test_a_seed_draws_the_same_again() -> None:
    assert draw(3, 20) == draw(3, 20) != draw(4, 20)
    places = {each.place.split("/")[0].split(":")[0] for each in sentences()}
    assert {"README.md", "docs", "torchrec_bls", "sharding", "benchmarks"} <= places
