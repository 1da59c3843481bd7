"""What a server costs: tokens a second over HTTP against those of the same engine asked directly, in turns."""

import statistics

from tests.load.bench import Bench, say
from tests.load.crowd import ask_all
from tests.load.questions import questions
from tests.load.server import serving


def overhead(bench: Bench) -> None:
    """Prints each turn and the medians; raises AssertionError for answers that differ."""
    ratios: dict[str, list[float]] = {"whole": [], "streamed": []}
    for turn in range(bench.turns):
        for kind, streamed in (("whole", 0.0), ("streamed", 1.0)):
            asked = questions(bench.requests, bench.seed, streamed)
            direct = bench.directly(asked)
            with serving(bench.settings) as server:
                tally = ask_all(server.port, asked, direct.answers, bench)
                assert server.stop() == 0, "".join(server.said)
            assert not tally.wrong, "\n".join(tally.wrong[:20])
            rates = direct.tokens / direct.seconds, direct.tokens / tally.seconds
            ratios[kind].append(rates[1] / rates[0])
            say(f"turn {turn + 1}, {kind}: {rates[0]:.0f} token/s directly, {rates[1]:.0f} served "
                f"({100 * (1 - ratios[kind][-1]):+.1f} % lost; the clients took {tally.processor_s:.1f} s of processor "
                f"in {tally.seconds:.1f} s)")  # fmt: skip
    for kind, found in ratios.items():
        least, most = 100 * (1 - max(found)), 100 * (1 - min(found))
        say(f"{kind}: {100 * (1 - statistics.median(found)):+.1f} % lost, from {least:+.1f} to {most:+.1f} %")
