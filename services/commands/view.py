"""How a run's status looks: one line for a log, a panel for a terminal."""

from __future__ import annotations

import time
from collections import deque

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import protos

BARS = " " + "".join(map(chr, range(0x2581, 0x2589)))
CURVE_WIDTH = 60
SMOOTHING = 0.3
KL_HEALTHY, KL_ALARM = 0.1, 0.2


class Rates:
    """What changed between two looks: steps, samples and tokens a second, and the reward's curve."""

    def __init__(self) -> None:
        self._before: tuple[float, int, int, int] | None = None
        self.steps = self.samples = self.tokens = 0.0
        self.rewards: deque[float] = deque(maxlen=CURVE_WIDTH)

    def see(self, status: protos.ConductorStatusReply) -> None:
        now = time.monotonic()
        seen = (now, status.step, status.ledger.trained, status.num_tokens)
        if self._before is not None and status.step >= self._before[1] and now > self._before[0]:
            seconds = now - self._before[0]
            rates = [(one - other) / seconds for one, other in zip(seen[1:], self._before[1:], strict=True)]
            known = (self.steps, self.samples, self.tokens)
            self.steps, self.samples, self.tokens = (
                old + SMOOTHING * (new - old) if old else new for old, new in zip(known, rates, strict=True)
            )
        self._before = seen
        if "reward_mean" in status.metrics:
            self.rewards.append(status.metrics["reward_mean"])


def line(status: protos.ConductorStatusReply, rates: Rates) -> str:
    """Everything that matters, in one line."""
    metrics = status.metrics
    shown = [f"{name} {metrics[key]:.3f}" for name, key in (("reward", "reward_mean"), ("kl", "kl")) if key in metrics]
    shown += [f"staleness {metrics['staleness_mean']:.1f}"] if "staleness_mean" in metrics else []
    parts = [
        status.state,
        f"step {status.step}/{status.num_steps}",
        *shown,
        f"{rates.steps:.1f} steps/s",
        f"{rates.samples:.0f} samples/s",
        f"{rates.tokens:.0f} tokens/s",
        f"{status.num_pushes} pushes",
        f"in flight {status.ledger.in_flight}",
        *evaluated(status),
    ]
    return "  ".join(parts) + ("" if status.ledger.balanced else "  LEDGER DOES NOT BALANCE")


def evaluated(status: protos.ConductorStatusReply) -> list[str]:
    """The newest evaluation that has ended, and the best one."""
    last = status.evaluation
    if "pass@1" not in last:
        return []
    parts = [f"pass@1 {last['pass@1']:.3f} at version {last['version']:.0f}"]
    best = last.get("best_pass@1", 0.0)
    return parts + ([f"best {best:.3f} at {last['best_version']:.0f}"] if best > last["pass@1"] else [])


def panel(status: protos.ConductorStatusReply, rates: Rates) -> RenderableType:
    """The live view: progress, reward curve, metrics, queue, services."""
    title = f"{status.run_folder.rsplit('/', 1)[-1]}: {status.state}"
    figures = (Text(line(status, rates)), curve(rates), metrics_line(status), mismatch_line(status))
    parts = (*figures, queue_line(status), services_table(status))
    return Panel(Group(*parts), title=title, title_align="left")


def curve(rates: Rates) -> Text:
    """The mean reward of the steps seen so far, scaled to its own range."""
    if not rates.rewards:
        return Text("reward  (no step yet)")
    low, high = min(rates.rewards), max(rates.rewards)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    bars = "".join(BARS[round((value - low) * scale)] for value in rates.rewards)
    return Text(f"reward  {low:.2f} {bars} {high:.2f}")


def metrics_line(status: protos.ConductorStatusReply) -> Text:
    text = Text()
    for name in ("loss", "kl", "entropy", "grad_norm", "lr", "truncation_rate", "logprob_diff_mean"):
        if name in status.metrics:
            value = status.metrics[name]
            style = kl_style(value) if name == "kl" else ""
            text.append(f"{name} {value:.3g}  ", style=style)
    return text


def mismatch_line(status: protos.ConductorStatusReply) -> Text:
    """How far the logprobs of each rollout server are from the trainer's."""
    known = [service for service in status.services if service.HasField("logprob_diff_mean")]
    return Text("logprob diff  " + "  ".join(f"{one.name} {one.logprob_diff_mean:.3g}" for one in known))


def kl_style(value: float) -> str:
    return "red" if value > KL_ALARM else "yellow" if value > KL_HEALTHY else ""


def queue_line(status: protos.ConductorStatusReply) -> Text:
    ledger = status.ledger
    queue = "  ".join(f"{name} {count}" for name, count in sorted(ledger.states.items()))
    ends = [f"trained {ledger.trained}"] + [f"dropped_{why} {count}" for why, count in ledger.dropped.items()]
    ends += [f"quarantined {ledger.quarantined}"] if ledger.quarantined else []
    stale = "  ".join(f"{age}: {count}" for age, count in sorted(status.staleness.items()))
    return Text(f"samples  {queue}  |  {'  '.join(ends)}  |  by staleness  {stale}")


def services_table(status: protos.ConductorStatusReply) -> Table:
    table = Table("service", "state", "version", "in hand", "heartbeat", "address", box=None, pad_edge=False)
    for service in status.services:
        version = str(service.policy_version) if service.role in ("rollout", "trainer") else ""
        age = f"{service.heartbeat_age_seconds:.1f} s ago" if service.address else ""
        table.add_row(service.name, service.state, version, str(service.in_hand or ""), age, service.address)
    return table
