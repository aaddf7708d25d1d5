"""What a profile found, in words and in numbers as people write them."""

from __future__ import annotations

from collections.abc import Sequence

from elsa_core.base.messages import side
from elsa_core.measuring.documents import Document
from elsa_core.measuring.intervals import FEWEST_ROUNDS


def point_name(row: Document) -> str:
    """A point in words: `384 px, batch 8, fp32, strict`, and `training step` where it is one."""
    found, asked = row["profile"], row["configuration"]
    size = found["image_size"] if found else asked["image_size"]
    pixels = [f"{side(size)} px"] if size else []
    is_step = found and all(run.get("parts") for run in found["runs"])
    step = ["training step"] if is_step else []
    named = [f"batch {asked['batch']}", asked["dtype"], asked["precision"]]
    return ", ".join([*pixels, *named, *step])


def duration(seconds: float) -> str:
    """Seconds with their unit and three digits: `2.50 s`, `257 ms`, `0.820 ms`, `41.0 us`."""
    if not seconds:
        return "0 us"
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= (1.0 if unit == "s" else 0.1):
            return f"{three(seconds * factor, zeros=True)} {unit}"
    return f"{three(seconds * 1e6, zeros=True)} us"


def three(number: float, *, zeros: bool = False) -> str:
    """A number of three digits at least, never in powers of ten: `2,536`, `25.4`, `0.082`."""
    if number >= 99.95:
        return f"{number:,.0f}"
    text = f"{number:#.3g}" if zeros else f"{number:.3g}"
    return f"{number:.6f}".rstrip("0").rstrip(".") if "e" in text else text


def ratio_text(ratio: Document | None, *, short: bool = False) -> str:
    """How many times as fast, with the interval; why there is none where rounds decide nothing.

    short: for one cell of a narrow table: `1.24`, `same ±3%`, `3 rounds`.
    """
    if ratio is None:
        return ""
    if ratio["verdict"] == "no difference":
        reach = max(ratio["high"], 1 / ratio["low"]) - 1  # of the interval, from 1
        within = f"{reach:.0%}" if reach >= 0.01 else f"{reach:.1%}"
        return f"same ±{within}" if short else f"no difference, within {within}"
    value, rounds = f"{ratio['value']:.2f}", f"{ratio['rounds']} rounds"
    if ratio["verdict"] == "unsure":
        return rounds if short else f"{value}x in {rounds}, too few to decide"
    return value if short else f"{value}x ({ratio['low']:.2f} to {ratio['high']:.2f})"


def group_short(sites: Sequence[Document]) -> str:
    """The short `ratio_text` of several sites together, by their times added up.

    The sums have no interval of their own: a number stands there only where every site is decided.
    """
    ratios = [site["ratio"] for site in sites]
    unsure = [each for each in ratios if each["verdict"] == "unsure"]
    equal = [each for each in ratios if each["verdict"] == "no difference"]
    if unsure:
        return ratio_text(min(unsure, key=lambda each: int(each["rounds"])), short=True)
    if len(equal) == len(ratios):
        widest = max(equal, key=lambda each: float(each["high"] / each["low"]))
        return ratio_text(widest, short=True)
    if equal:
        return "undecided"
    before, after = (sum(s[key] for s in sites) for key in ("seconds_before", "seconds_after"))
    return f"{before / after:.2f}"


def verdict_text(found: Document) -> str:
    """The headline of a point: the fastest patched run against the fastest baseline."""
    gain, own, best = found["gain"], found["best_patched"], found["best_baseline"]
    usual = (own, best) == ("patched", "eager")
    if gain["verdict"] == "no difference":
        against = "" if usual else f" between {own} and {best}"
        return ratio_text(gain).replace("difference,", f"difference found{against}:")
    if gain["verdict"] == "unsure":
        return (
            f"undecided: {gain['rounds']} rounds fitted into the budget, {FEWEST_ROUNDS} are "
            "needed; a longer budget gives them"
        )
    pair = "" if usual else f"{own} is "
    against = "" if usual else f" than {best}"
    if gain["verdict"] == "slower":
        value, low, high = (1 / gain[key] for key in ("value", "high", "low"))
    else:
        value, low, high = (gain[key] for key in ("value", "low", "high"))
    return f"{pair}{value:.2f}x {gain['verdict']}{against}, {low:.2f} to {high:.2f}"


def bound_text(found: Document) -> str:
    """Words for runs whose time is the host's, empty where there are none."""
    bound = [run for run in found["runs"] if run["bound"] == "host"]
    if not bound:
        return ""
    one = bound[0]
    named = ", ".join(run["name"] for run in bound)
    return (
        f"bound by launches: {named}; {one['name']} computes for "
        f"{duration(one['device_seconds'])} of {duration(one['seconds'])}, "
        "the GPU waits for the host otherwise"
    )


def warning_lines(rows: Sequence[Document]) -> list[str]:
    """Warnings and notes of measured points: one line for each point that has any, or one for all
    where they all have the same."""
    found = [(row, "; ".join([*row["profile"]["warnings"], *row["profile"]["notes"]]))
             for row in rows]  # fmt: skip
    texts = dict.fromkeys(text for _, text in found if text)
    if len(texts) == 1 and all(text for _, text in found):
        return list(texts)
    several = len(rows) > 1
    return [(f"{point_name(row)}: " if several else "") + text for row, text in found if text]


def tokens_text(site: Document) -> str:
    """Tokens of a site: one number, or queries:keys."""
    queries, keys = site["query_tokens"], site["key_tokens"]
    if queries is None:
        return ""
    return f"{queries}" if queries == keys else f"{queries}:{keys}"


def place(path: str) -> list[tuple[int, int, str]]:
    """A key that sorts paths as a model has them: numbers by value, not by their digits."""
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in path.split(".")]


def shares(sites: Sequence[Document]) -> list[str]:
    """The sites' shares of the model's time as texts that add up to 100.0%: the last row, the rest,
    takes the rounding.
    """
    tenths = [round(1000 * site["share"]) for site in sites[:-1]]
    return [f"{each / 10:.1f}%" for each in (*tenths, 1000 - sum(tenths))] if sites else []
