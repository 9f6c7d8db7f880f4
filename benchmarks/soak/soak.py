"""Exchanges small messages among 8 ranks for a long time and checks every byte and resource."""

from benchmarks.harness import record
from benchmarks.soak.page import problems, section
from benchmarks.soak.ranks import SETTINGS, soak


def main() -> None:
    """Soaks as long as the command line says; exits with 1 when a resource has grown."""
    parser = record.parser(__doc__)
    parser.add_argument("--iterations", type=int, default=SETTINGS["iterations"])
    parser.add_argument("--seconds", type=float, help="stop after the run that is under way then")
    parser.add_argument("--seed", type=int, default=SETTINGS["seed"])
    arguments = parser.parse_args()
    given = {name: getattr(arguments, name) for name in ("iterations", "seconds", "seed")}
    settings = SETTINGS | given
    before = record.environment()
    results = soak(settings)
    record.publish(arguments.json, "soak", before, settings, results, section)
    if found := problems(results):
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
