"""How a Router's plans scale: their time and makespan, many Routers with old reports, and the bytes of a host.

    python -m benchmarks.router_scale --quick

Needs no engine and no Ray. Replicas are simulated as servers that work off their queue at one speed, one token in one
unit of time; results are ratios within one run. Every Router has a batch at the same moment, step after step.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from scoring.affinity import Affinity, Prefixes, find_groups, plan_by_prefix
from scoring.batches import MatrixBatch
from scoring.reads import MatrixRead
from scoring.sharding import plan

SIGMAS = {"narrow": 0.5, "wide": 0.8}
MOST_TOKENS = 32_768
BLOCK = 32  # tokens
READS_PER_REPLICA = 5
UTILISATION = 0.8
WARM_UP = 5  # steps that are not counted


def lengths(rng: np.random.Generator, count: int, kind: str) -> np.ndarray:
    """int64 [count]: tokens of prompt and response, both lognormal (medians 700 and 2500), at most MOST_TOKENS."""
    prompts, responses = (rng.lognormal(np.log(median), SIGMAS[kind], count) for median in (700, 2500))
    return np.clip(prompts + responses, 1, MOST_TOKENS).astype(np.int64)


def lower_bound(costs: np.ndarray, replicas: int) -> float:
    """Tokens that no plan over idle replicas undercuts: the mean load, the longest read, and what has to meet: of the
    k * replicas + 1 longest reads, some k + 1 share a replica."""
    falling = -np.sort(-costs)
    meeting = (falling[k * replicas - k : k * replicas + 1].sum() for k in range(1, (len(costs) - 1) // replicas + 1))
    return max(costs.sum() / replicas, falling[0], *meeting)


def longest_first(costs: np.ndarray, replicas: int) -> int:
    """The makespan of the plain rule: longest first, to the least loaded."""
    heap = [0] * replicas
    for cost in (-np.sort(-costs)).tolist():
        heapq.heapreplace(heap, heap[0] + cost)
    return max(heap)


def time_plan(seed: int, reads: int, replicas: int, kind: str) -> tuple[float, float, float]:
    """Seconds of one plan; its makespan, and that of the plain rule, over the lower bound."""
    costs, loads = lengths(np.random.default_rng(seed), reads, kind), {f"{i:05}": 0 for i in range(replicas)}
    start = time.perf_counter()
    shards = plan(costs, loads)
    seconds = time.perf_counter() - start
    least = lower_bound(costs, replicas)
    return seconds, max(costs[s].sum() for s in shards.values()) / least, longest_first(costs, replicas) / least


def sharing_batch(rng: np.random.Generator, reads: int, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids int32, offsets int64 [N + 1] and prompt lengths int64 [N] of reads, of which `kind` says what they share."""
    if kind == "256 labels of a rubric":  # of 512 tokens, and an answer of 16 each
        prompts, lengths, shared = np.full(reads, 528), np.full(reads, 528), np.full(reads, 512)
        of_one = 256
    else:
        of_one = 8 if kind == "8 samples a prompt" else 1
        parts = [
            np.minimum(rng.lognormal(np.log(m), 0.5, reads), MOST_TOKENS // 2).astype(int) + 1 for m in (700, 2500)
        ]
        prompts = np.repeat(parts[0][::of_one], of_one)[:reads]
        lengths, shared = prompts + parts[1], prompts
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(0, 150_000, offsets[-1], dtype=np.int32)
    for i in range(reads):
        if i % of_one:
            first, start = offsets[i - i % of_one], offsets[i]
            ids[start : start + shared[i]] = ids[first : first + shared[i]]
    return ids, offsets, prompts


def time_plan_by_prefix(seed: int, reads: int, replicas: int, kind: str) -> tuple[float, ...]:
    """Seconds to hash a batch, to plan it, and to plan it when it comes again; the fullest replica's prefilled tokens
    over the mean; all tokens prefilled over those without reuse; and the share of reads that stay where they were."""
    ids, offsets, prompts = sharing_batch(np.random.default_rng(seed), reads, kind)
    loads, affinity, everything = {f"{i:05}": 0 for i in range(replicas)}, Affinity(), np.arange(reads)
    costs, priority = np.diff(offsets), np.zeros(reads, np.int32)
    seconds, parts = [time.perf_counter()], []
    prefixes = Prefixes(ids, offsets, prompts - 1, BLOCK, np.zeros(reads, np.int64))
    seconds.append(time.perf_counter())
    for _ in range(2):
        groups = find_groups(prefixes, everything)
        parts.append(plan_by_prefix(costs, priority, loads, groups, *affinity.homes(groups)))
        affinity.keep(groups, {name: part.reads for name, part in parts[-1].items()})
        seconds.append(time.perf_counter())
    work = [int((costs[part.reads] - part.reused).sum()) for part in parts[0].values()]
    stayed = sum(len(np.intersect1d(part.reads, parts[0][name].reads)) for name, part in parts[1].items()) / reads
    return *np.diff(seconds), max(work) / (sum(work) / replicas), sum(work) / costs.sum(), stayed


class Cluster:
    """Replicas that work off the calls they are sent in turn, and the calls that have not ended."""

    def __init__(self, replicas: int, routers: int) -> None:
        self.now = 0.0
        self._free = np.zeros(replicas)  # when each replica has nothing left to do
        self._shape = routers, replicas
        self._calls: list[tuple[int, int, int, float]] = []  # Router, replica, tokens, when it ends

    def send(self, router: int, replica: int, costs: np.ndarray) -> np.ndarray:
        """Send one call of some reads; when each of them ends."""
        ends = max(self._free[replica], self.now) + np.cumsum(costs)
        self._free[replica] = ends[-1]
        self._calls.append((router, replica, int(costs.sum()), ends[-1]))
        return ends

    def go_on(self, until: float) -> None:
        """Let time pass."""
        self.now = until
        self._calls = [call for call in self._calls if call[3] > until]

    def outstanding(self) -> np.ndarray:
        """[2, Routers, replicas]: tokens, and calls, that each Router waits for. A call counts whole until it ends."""
        table = np.zeros((2, *self._shape))
        if self._calls:
            router, replica, tokens, _ = np.array(self._calls).T
            at = router.astype(int), replica.astype(int)
            np.add.at(table[0], at, tokens)
            np.add.at(table[1], at, 1)
        return table


class View(NamedTuple):
    """What Routers know at the moment they choose; each array is as `Cluster.outstanding`."""

    own: np.ndarray  # its own, now
    others: np.ndarray  # the others', as it was when the last step had been sent
    interval: float  # what a replica can work off in one step
    typical: float  # tokens of a read


Policy = Callable[[Cluster, np.ndarray, np.ndarray, View, np.random.Generator], np.ndarray]
"""Sends all reads: (cluster, costs [N], Router of each read [N], view, chance) -> when each ends [N]."""


def planned(loads: Callable[[View, np.random.Generator], np.ndarray]) -> Policy:
    """`plan` by each Router, on [Routers, replicas] tokens that it takes for the loads."""

    def send(cluster: Cluster, costs: np.ndarray, router: np.ndarray, view: View, rng: np.random.Generator):
        ends = np.empty(len(costs))
        tokens = loads(view, rng).astype(int).tolist()
        for m in rng.permutation(len(tokens)).tolist():
            reads = np.flatnonzero(router == m)
            for name, shard in plan(costs[reads], {f"{i:05}": load for i, load in enumerate(tokens[m])}).items():
                ends[reads[shard]] = cluster.send(m, int(name), costs[reads[shard]])
        return ends

    return send


def apart(view: View, rng: np.random.Generator) -> np.ndarray:
    """Up to half a read for each replica, of each Router's own, so that not all prefer the same ones; alone, none."""
    return rng.random(view.own[0].shape) * view.typical / 2 * (len(view.own[0]) > 1)


def aged(view: View) -> np.ndarray:
    """The others' load less what was worked off since; each Router answers for its part of it only."""
    return np.maximum(view.others[0] - view.interval, 0) / len(view.own[0])


def one_by_one(choose: Callable[[View, np.random.Generator, int], Callable[[int], int]]) -> Policy:
    """Every read is a call, and the Routers take turns. `choose(view, rng, replicas)` makes what picks the replica."""

    def send(cluster: Cluster, costs: np.ndarray, router: np.ndarray, view: View, rng: np.random.Generator):
        ends, pick = np.empty(len(costs)), choose(view, rng, view.own.shape[2])
        for i in rng.permutation(len(costs)).tolist():
            m = int(router[i])
            ends[i] = cluster.send(m, pick(m), costs[i : i + 1])[0]
        return ends

    return send


def round_robin(view: View, rng: np.random.Generator, replicas: int) -> Callable[[int], int]:
    turn = rng.integers(0, replicas, view.own.shape[1]).tolist()

    def pick(m: int) -> int:
        turn[m] = (turn[m] + 1) % replicas
        return turn[m]

    return pick


def power_of_two(fresh: bool) -> Callable[[View, np.random.Generator, int], Callable[[int], int]]:
    """Of two replicas the one with fewer calls. `fresh`: all Routers see every call at once; Serve caches counts."""

    def choose(view: View, rng: np.random.Generator, replicas: int) -> Callable[[int], int]:
        seen = view.own[1].sum(axis=0, keepdims=True) if fresh else view.own[1] + view.others[1]
        counts = seen.tolist()

        def pick(m: int) -> int:
            known = counts[0 if fresh else m]
            first, second = rng.integers(0, replicas, 2).tolist()
            chosen = first if known[first] <= known[second] else second
            known[chosen] += 1
            return chosen

        return pick

    return choose


POLICIES: dict[str, Policy] = {
    "plan: own load, aged reports, apart": planned(lambda v, rng: v.own[0] + aged(v) + apart(v, rng)),
    "plan: own load, apart": planned(lambda v, rng: v.own[0] + apart(v, rng)),
    "plan: own load, ties by name": planned(lambda v, rng: v.own[0]),
    "plan: own load + reports as they are": planned(lambda v, rng: v.own[0] + v.others[0]),
    "power of two, fresh counts": one_by_one(power_of_two(fresh=True)),
    "power of two, the same old reports": one_by_one(power_of_two(fresh=False)),
    "round-robin": one_by_one(round_robin),
}


def simulate(send: Policy, seed: int, routers: int, replicas: int, steps: int, kind: str) -> tuple[float, float]:
    """Mean time until a Router has its batch back, and mean time that a read waits for its start."""
    rng, chance = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    cluster, count = Cluster(replicas, routers), replicas * READS_PER_REPLICA
    typical = float(lengths(np.random.default_rng(0), 100_000, kind).mean())
    interval = typical * READS_PER_REPLICA / UTILISATION
    router = np.arange(count) * routers // count
    then, makespans, waits = cluster.outstanding(), [], []
    for step in range(steps):
        cluster.go_on(step * interval)
        costs = lengths(rng, count, kind)
        others = then.sum(axis=1, keepdims=True) - then
        ends = send(cluster, costs, router, View(cluster.outstanding(), others, interval, typical), chance)
        then = cluster.outstanding()
        if step >= WARM_UP:
            last = np.zeros(routers)
            np.maximum.at(last, router, ends - cluster.now)
            makespans.append(last.mean())
            waits.append((ends - costs - cluster.now).mean())
    return float(np.mean(makespans)), float(np.mean(waits))


def spread(values: Iterable[float], form: str = ".2f") -> str:
    """Median, least and most."""
    values = np.array(list(values))
    return f"{np.median(values):{form}} [{values.min():{form}}, {values.max():{form}}]"


def print_plans(args: argparse.Namespace) -> None:
    sizes = [(5_000, 1000), (100_000, 1000), (1_000_000, 1000)][: 2 if args.quick else 3]
    print(f"One plan over idle replicas: median [least, most] of {args.repeats}")
    print(f"{'reads':>9} {'replicas':>8} {'lengths':8} {'seconds':>24} {'makespan / bound':>26} {'plain / bound':>26}")
    for reads, replicas in sizes:
        for kind in SIGMAS:
            runs = [time_plan(args.seed + i, reads, replicas, kind) for i in range(args.repeats)]
            seconds, ours, plain = (spread(column, ".4f") for column in zip(*runs, strict=True))
            print(f"{reads:9} {replicas:8} {kind:8} {seconds:>24} {ours:>26} {plain:>26}")


def print_plans_by_prefix(args: argparse.Namespace) -> None:
    reads, replicas, repeats = 100_000, 1000, 2 if args.quick else args.repeats
    print(f"\n{reads} reads over {replicas} idle replicas that reuse prefixes: median [least, most] of {repeats}")
    heads = ("hashed, s", "planned, s", "again, s", "fullest / mean", "prefilled / all", "at home again")
    print(f"{'reads share':24}" + "".join(f"{head:>24}" for head in heads))
    for kind in ("nothing", "8 samples a prompt", "256 labels of a rubric"):
        runs = [time_plan_by_prefix(args.seed + i, reads, replicas, kind) for i in range(repeats)]
        print(f"{kind:24}" + "".join(f"{spread(column, '.3f'):>24}" for column in zip(*runs, strict=True)))


def print_policies(args: argparse.Namespace) -> None:
    replicas, steps = (64, 15) if args.quick else (128, 30)
    print(f"\n{steps} steps of {READS_PER_REPLICA} reads for each of {replicas} replicas, {UTILISATION:.0%} busy.")
    print(f"Ratios to the first line, run by run, median [least, most] of {args.repeats}; above 1 is worse than it.")
    for kind in SIGMAS:
        for routers in (1, 8, 64):
            print(f"{f'{kind} lengths, Routers: {routers}':40} {'makespan of a batch':>22} {'waiting of a read':>22}")
            base = None
            for name, send in POLICIES.items():
                runs = [simulate(send, args.seed + i, routers, replicas, steps, kind) for i in range(args.repeats)]
                base = base or runs
                ratios = [
                    [a / b for a, b in zip(run, first, strict=True)] for run, first in zip(runs, base, strict=True)
                ]
                makespan, waiting = (spread(column) for column in zip(*ratios, strict=True))
                print(f"  {name:38} {makespan:>22} {waiting:>22}")


def print_bytes(args: argparse.Namespace) -> None:
    ids = np.zeros((args.response, args.candidates), dtype=np.int32)
    batch = MatrixBatch.from_reads([MatrixRead(np.zeros(args.prompt, np.int32), ids[:, 0], ids)])
    there = sum(array.nbytes for array in vars(batch).values() if isinstance(array, np.ndarray))
    back = 4 * args.response * (1 + args.candidates)  # float32, the response's own column with it
    print(
        f"\nA read with C={args.prompt}, R={args.response}, K={args.candidates}: bytes there {there:,}, back {back:,}"
    )
    replica = args.replica_speed / (args.prompt + args.response)  # reads/s
    print(f"One replica of {args.replica_speed:,.0f} tokens/s: {replica * (there + back) / 1e6:,.1f} MB/s of them")
    print(f"{'host of the Router':26} {'reads/s at which full:':>24} {'replicas fed':>14}")
    for host, times in (("the caller's own process", 1), ("an actor or the ingress", 2)):
        one_way = max(there, back) if times == 1 else there + back
        nic, store = args.nic_gbit * 1e9 / 8 / one_way, args.store_gbyte * 1e9 / (times * (there + back))
        for limit, full in ((f"NIC {args.nic_gbit:g} Gbit/s", nic), (f"store {args.store_gbyte:g} GB/s", store)):
            print(f"{host:26} {limit:>15} {full:8,.0f} {full / replica:14,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router_scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="of the lengths; each repeat takes the next (default 0)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each line (default 5)")
    parser.add_argument("--quick", action="store_true", help="smaller clusters and batches: less than a minute")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens C of the read whose bytes are counted")
    parser.add_argument("--response", type=int, default=3000, help="its response tokens R")
    parser.add_argument("--candidates", type=int, default=64, help="its candidates K in each row")
    parser.add_argument("--nic-gbit", type=float, default=100, help="what the host's network carries in each direction")
    parser.add_argument("--store-gbyte", type=float, default=5, help="GB/s copied into and out of the object store")
    parser.add_argument("--replica-speed", type=float, default=20_000, help="tokens/s that one replica prefills")
    args = parser.parse_args()
    print_plans(args)
    print_plans_by_prefix(args)
    print_policies(args)
    print_bytes(args)


if __name__ == "__main__":
    main()
