"""Sentences on error-bounded embeddings, quantized collectives and LIBRA."""

from benchmarks.bounded.page import interval
from benchmarks.libra.fit import PRINTED
from benchmarks.prose.figures import NUMBERS, Records, Sentences, range_of

_DECAYS = ("stepwise", "linear", "logarithmic")


def bounded(records: Records) -> Sentences:
    results = records["bounded"]["results"]
    planted = next(each["changes"] for each in results if "changes" in each)
    found = next(each for each in results if "batches" in each)

    def shown(cell: str, form: str = ".3f") -> str:
        return " to ".join(f"{end:{form}}" for end in interval(planted[cell]))

    def fall(cell: str) -> str:
        high, low = (f"{-end:.3f}" for end in interval(planted[cell]))
        return f"{-planted[cell]['accuracy']:.3f} % ({low} to {high}"

    def t(cell: str) -> str:
        return f"{planted[cell]['accuracy'] / planted[cell]['seed_error']:.1f}"

    yield (
        f"the change is {planted['0.01']['accuracy']:.3f} % ({shown('0.01')}) at 0.01 and "
        f"{planted['0.02']['accuracy']:.3f} % ({shown('0.02')}) at 0.02"
    )
    yield f"by {fall('0.05')}), a small change but a sure one (t = {t('0.05')})"
    decaying = "by size, 2x stepwise"
    yield f"It loses {fall(decaying)}; t = {t(decaying)})"
    yield f"without a decay lose {fall('by size')}; t = {t('by size')})"
    yield f"By eta nothing is shown ({shown('by eta')})"
    ratio = {cell: of["ratio"] for cell, of in planted.items()}
    yield (f"save nothing over 0.02 for all**, {ratio['by size']:.1f} against {ratio['0.02']:.1f}")
    yield f"By eta it is {ratio['by eta']:.1f}"
    times = {cell: ratio[f"by size, 2x {cell}"] / ratio["by size"] for cell in _DECAYS}
    yield (
        f"Twice the bound stepwise gives {times['stepwise']:.2f} times the ratio of no decay; the "
        f"paper has 1.09 for Kaggle. Linear gives {times['linear']:.2f}, logarithmic "
        f"{times['logarithmic']:.2f}. Over 0.02 for all it is {ratio[decaying] / ratio['0.02']:.2f}"
    )
    dropped, stepwise = (
        [f"{ratio[f'by size, {many}x {how}']:.1f}" for many in (2, 3)]
        for how in ("dropped", "stepwise")
    )
    yield (
        f"It compresses more, {dropped[0]} and {dropped[1]} against {stepwise[0]} and {stepwise[1]}"
    )
    few, many = (
        {name: sum(of["fp32"]) / sum(sent) for name, sent in of.items()}
        | {"either": sum(of["fp32"]) / sum(map(min, of["window 255"], of["Huffman"]))}
        for of in (found["batches"][size] for size in ("128", "2048"))
    )
    yield f"has the paper's ratio** at 128 rows, {few['either']:.1f} against 11.2"
    yield f"At 2,048 rows it has {many['either']:.1f} against 19.9"
    yield (
        f"Ours has {few['ours']:.1f} and {many['ours']:.1f}, with ids {few['with ids']:.1f} and "
        f"{many['with ids']:.1f}"
    )
    yield f"zstd -1 on the codes adds them up too, {few['zstd']:.1f} and {many['zstd']:.1f}"
    first, quarter, _, last = (each["ratio"] for each in found["phases"])
    yield (
        f"It falls from {first:.0f} before the training to {quarter:.0f} after a quarter of it and "
        f"{last:.0f} in the end"
    )
    calls = [each["apart"]["seconds"] / each["whole"]["seconds"] for each in found["chunks"]]
    saved = max(each["apart"]["bytes"] / each["whole"]["bytes"] - 1 for each in found["chunks"])
    times = range_of(calls, ".2f")
    yield f"saves little here**, {times} times and {100 * saved:.0f} % of the bytes"


def quantized(records: Records) -> Sentences:
    planted, movies = (
        {name: each["accuracy"] for name, each in of["changes"].items()}
        for of in records["quantized"]["results"][:2]
    )

    def by_nodes(row: str, form: str) -> str:
        return ", ".join(f"{planted[f'table 3, {row}, {n} nodes']:{form}}" for n in (32, 64, 128))

    yield (
        f"loses more with each doubling of the nodes ({by_nodes('uint4 ring', '.2f')}; the paper"
    )
    yield f"**compensation makes it worse** ({by_nodes('uint2 ring EC', '.1f')}; the paper"
    least = min(planted[f"table 3, uint2 RD, {nodes} nodes"] for nodes in (32, 64, 128))
    yield f"Recursive doubling stays within {least:.1f}"
    control = records["quantized"]["results"][0]["changes"]["table 0, fp32 ring, 32 nodes"]
    yield f"has a standard deviation of {control['spread']:.2f} % itself"
    strange = records["quantized"]["results"][0]["changes"][
        "table 4, uint4 ring EC; (f4, b2), 64 nodes"
    ]
    yield f"has no counterpart here ({strange['accuracy']:.2f} ± {strange['spread']:.2f})"
    ring, both = (
        [f"{movies[f'{table}, uint4 {row}, 32 nodes']:.2f}" for row in rows]
        for table, rows in (
            ("table 3", ("ring EC", "ring")),
            ("table 4", ("RD EC; (f4, b4)", "RD; (f4, b4)")),
        )
    )
    yield (
        f"`uint4 ring EC` is no better than without it, {ring[0]} against {ring[1]}, and "
        f"`uint4 RD EC` in table 4 neither, {both[0]} against {both[1]}"
    )
    errors = {each["row"]: each["errors"] for each in records["quantized"]["compensation"]}
    first, _, last, _ = errors["uint2 ring EC"]
    yield f"from {first:.1f} times the sum at first to {last:.0f} times after 20"


def libra(records: Records) -> Sentences:
    results = records["libra"]["results"]
    ours = dict(zip(PRINTED, results["fits"][0]["percent"], strict=True))
    near = sum(abs(ours[name] - printed) <= 1.2 for name, printed in PRINTED.items())
    yield f"**{NUMBERS[near].capitalize()} of {len(PRINTED)} numbers come out within 1.2 points**"
    gain = ours["6: LIBRA's throughput over MG-N, most"]
    shorter = ours["7: LIBRA's backward under MG-N, most"]
    yield f"it is {gain:.1f} % here, where LIBRA's backward is {shorter:.1f} % shorter"
    least = ours["7: LIBRA's backward under H-N, least"]
    yield f"shorter than H-N's ({least:.1f} %)"
    left = ours["7: LIBRA's residual communication under MG-N, mean"]
    yield f"(there is {-left:.1f} % more here)"
    closer = ours["7: LIBRA's backward over MG-CF, mean"]
    yield f"**LIBRA is closer to MG-CF than printed**: {closer:.1f} and not 10.9 % of the backward"
    at_8 = [each["ms"] for each in results["at_8"]]
    last = [
        {name: values[-1] for name, values in each["relative"].items()} | each
        for each in results["scaling"]
    ]
    over_one = max(100 * (1 - ms["LIBRA"] / ms["one r"]) for ms in at_8)
    at_most = max(100 * (each["LIBRA"] / each["one r"] - 1) for each in last)
    yield f"are within {over_one:.1f} % of LIBRA at 8 nodes and within {at_most:.1f} % at 2,048"
    under = range_of([100 * (1 - ms["LIBRA"] / ms["MG-N"]) for ms in at_8], ".0f")
    yield f"LIBRA's backward is {under} % shorter than MG-N's"
    (vgg,) = (each for each in last if each["network"] == "VGG16" and not each["tree"])
    yield f"LIBRA gains {100 * (vgg['LIBRA'] / vgg['SE'] - 1):.1f} % over SE on VGG16"
    most = max(results["at_8"], key=lambda each: each["over"][0])
    yield (
        f"miss the optimum by {most['over'][0]:.1f} % at most, which is {most['network']}'s: the "
        f"optimum has {most['groups']} groups"
    )
    shared = results["shared_cores"]
    yield f"lose much: {100 * (shared['given'] / shared['held'] - 1):.0f} % in the last section"
