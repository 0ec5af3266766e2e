"""The choice of runs for all partitions of one plan, until all fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from gpipebal.memory.cell import Cell
from gpipebal.memory.loss import loss_of_micro_batch
from gpipebal.memory.recomputed_runs import with_nothing_saved_before, with_runs
from gpipebal.plan import Plan
from gpipebal.planner.evaluate import evaluate
from gpipebal.planner.posing import Posed
from gpipebal.planner.recompute.choice import LayerRecompute
from gpipebal.planner.recompute.network import partition_network
from gpipebal.planner.recompute.ways import Choice, SearchTime, choices_of, in_order
from gpipebal.planner.runs.moments import moments_of
from gpipebal.problem import Device, to_bounds
from gpipebal.problem.checks import largest_denominator, scaled
from gpipebal.schedule import CheckpointMode, order_of
from gpipebal.solvers.knapsack.knapsack import Way, cheapest, lowest
from gpipebal.solvers.knapsack.network import Network

__all__ = ["MOST_ROUNDS", "RunChoice"]

#: How often the limits are tightened by amounts that are known only for a whole choice.
MOST_ROUNDS = 12
#: Where that does not help: how many ways are listed for each partition, and how many of their
#: combinations are tried.
_MOST_WAYS, _MOST_CHOICES = 64, 300


class RunChoice:
    """The choice for all partitions of one plan, and what it costs.

    Args:
        posed: The plan as a question.
        plan: The plan.
        time: Seconds for each partition.
        limits: Bytes that each partition may need.
    """

    def __init__(
        self,
        posed: Posed,
        plan: Plan,
        time: SearchTime,
        limits: Sequence[int | None],
    ) -> None:
        self._posed, self._plan, self._time = posed, plan, time
        self._limits = limits
        self._bounds = to_bounds(plan.balance)
        self._networks: dict[int, Network] = {}
        # What a partition may need by its network's figures: its limit, until that is too much.
        self._rooms: dict[int, int] = {}
        self._ways: dict[int, Way] = {}
        self._lower_bounds: dict[int, int] = {}
        self._lowest_ways: dict[int, Way] = {}
        # Whether it is certain that a partition does not fit, whatever is recomputed.
        self.all_tried = True

    @cached_property
    def before(self) -> Plan:
        """What the plan costs without any run."""
        return self._evaluated()

    def answer(self) -> LayerRecompute | int:
        """Return the choice; if there is none, the partition that does not fit."""
        before = found = self.before
        for _ in range(MOST_ROUNDS):
            over = self._over(found)
            if not over:
                return self._result(before, found)
            for j, shortage in over.items():
                way = self._solved(j, shortage)
                if way is None:
                    return self._with_other_runs(before, j)
                self._ways[j] = way
            found = self._evaluated()
        over = self._over(found)
        if over:
            return self._with_other_runs(before, next(iter(over)))
        return self._result(before, found)

    def _with_other_runs(self, before: Plan, j: int) -> LayerRecompute | int:
        """Try runs of all partitions together; return the choice, or a partition over its limit."""
        network, limit = self._network(j), self._limits[j]
        if network is None or limit is None or self._lowest(j, network).peak > limit:
            return j
        lists = []
        for k, mode in enumerate(self._plan.modes):
            network = self._network(k) if mode == "never" or k in {j, *self._ways} else None
            if network is None:
                lists.append([Choice(0.0, None)])
                continue
            with self._time.search(k) as left:
                ways, are_all = choices_of(network, self._limits[k], _MOST_WAYS, left)
            lists.append([Choice(self._seconds(k, way.cost), way) for way in ways])
            self.all_tried &= are_all and mode == "never"
        for n_tried, choice in enumerate(in_order(lists)):
            if n_tried == _MOST_CHOICES:
                self.all_tried = False
                break
            self._ways = {k: one.way for k, one in enumerate(choice) if one.way is not None}
            found = self._evaluated()
            if not self._over(found):
                return self._result(before, found)
        return j

    def needed(self) -> tuple[int, ...]:
        """Return what partitions need if those over their limits recompute what needs least."""
        for j in self._over(self.before):
            network = self._network(j)
            if network is not None:
                self._ways[j] = self._lowest(j, network)
        found, before = self._evaluated().partitions, self.before.partitions
        for j in list(self._ways):
            if found[j].memory.total > before[j].memory.total:
                del self._ways[j]  # the plan's own mode needs less
        return tuple(part.memory.total for part in self._evaluated().partitions)

    def _over(self, plan: Plan) -> dict[int, int]:
        """Return by how much partitions exceed their limits."""
        pairs = zip((part.memory.total for part in plan.partitions), self._limits, strict=True)
        return {j: n - m for j, (n, m) in enumerate(pairs) if m is not None and n > m}

    def _solved(self, j: int, shortage: int) -> Way | None:
        """Find the runs of a partition that exceeds its limit."""
        network, limit = self._network(j), self._limits[j]
        if network is None or limit is None:
            return None
        before = self._ways.get(j)
        if before is None:
            way = self._cheapest(j, network, limit)
            if way is not None:
                self._rooms[j], self._lower_bounds[j] = limit, way.lower_bound
            return way
        # It fits without what waits, and what an earlier partition saves; these need room too.
        least = self._lowest(j, network).peak
        if before.peak == least:
            return None
        room = min(self._rooms[j] - shortage, before.peak - 1)
        self._rooms[j] = max(least, room)
        return self._cheapest(j, network, self._rooms[j])

    def _cheapest(self, j: int, network: Network, limit: int) -> Way | None:
        with self._time.search(j) as left:
            return cheapest(network, limit, left)

    def _lowest(self, j: int, network: Network) -> Way:
        if j not in self._lowest_ways:
            self._lowest_ways[j] = lowest(network)
        return self._lowest_ways[j]

    def _network(self, j: int) -> Network | None:
        """Return all ways to recompute layers of a partition; None: it keeps nothing at all."""
        if j not in self._networks:
            question, profile = self._posed.question, self._posed.profile
            first, end = self._bounds[j : j + 2]
            inside = question.loss_inside and end == profile.n_layers
            loss = loss_of_micro_batch(profile) if inside else None
            # Earlier partitions may come to save less, which can leave more room in one memory.
            profile = with_nothing_saved_before(profile, first)
            cell = Cell(profile, first, end, loss, question.shared_memory)
            if not cell.goes_back:
                self.all_tried = False  # a way that keeps less is not looked for
                return None
            modes, chunks = self._modes_with(j), self._posed.chunks
            exist = question.gradients_exist
            order = order_of(question.schedule, question.n_partitions, chunks, modes)
            moments = moments_of(
                order, j, loss_inside=not cell.gives_outputs, gradients_exist=exist
            )
            costs = [*scaled(self._times(j), self._scale(j)), 0]
            # Of ways that take equally long, one that recomputes fewer layers.
            costs = [(end - first + 1) * cost + 1 for cost in costs]
            self._networks[j] = partition_network(
                cell, moments, chunks, costs, gradients_exist=exist
            )
        return self._networks[j]

    def _times(self, j: int) -> list[float]:
        """Return the seconds of recomputing each layer of a partition, on the profile's device."""
        devices = self._posed.problem.devices
        own = None if devices is None else devices[j].recompute
        if own is None:
            own = [layer.recompute_time for layer in self._posed.profile.layers]
        return list(own[self._bounds[j] : self._bounds[j + 1]])

    def _scale(self, j: int) -> int:
        return largest_denominator(self._times(j))

    def _seconds(self, j: int, cost: int) -> float:
        """Return the seconds that a cost of the network stands for."""
        n_layers = self._plan.balance[j] + 1
        devices = self._posed.problem.devices
        slowness = 1 if devices is None else devices[j].slowness
        return slowness * (cost // n_layers) / self._scale(j)

    def _modes_with(self, *partitions: int) -> tuple[CheckpointMode, ...]:
        """Return the plan's modes, with these partitions recomputing no micro-batch as a whole."""
        return tuple(
            "never" if j in partitions else mode for j, mode in enumerate(self._plan.modes)
        )

    def _runs(self) -> list[range]:
        return [arc.name for j in sorted(self._ways) for arc in self._ways[j].arcs if arc.name]

    def _evaluated(self) -> Plan:
        """Predict what the plan costs with the runs found so far."""
        question, runs = self._posed.question, self._runs()
        modes = self._modes_with(*self._ways)
        plan = evaluate(
            with_runs(self._posed.profile, runs),
            self._plan.balance,
            chunks=self._posed.chunks,
            checkpoint=modes[0] if len(set(modes)) == 1 else modes,
            schedule=question.schedule,
            loss_inside=question.loss_inside,
            shared_memory=question.shared_memory,
            gradients_exist=question.gradients_exist,
            devices=self._devices(runs),
            link=question.link,
        )
        # The arguments with one entry for each partition are in the plan's order already.
        return replace(plan, device_order=self._plan.device_order)

    def _devices(self, runs: Sequence[range]) -> list[Device] | None:
        devices = self._posed.problem.devices
        if devices is None:
            return None
        again = {k for run in runs for k in run}
        return [
            device
            if device.backward is None or device.recompute is None
            else replace(
                device,
                backward=[
                    b + (r if k in again else 0)
                    for k, (b, r) in enumerate(zip(device.backward, device.recompute, strict=True))
                ],
            )
            for device in devices
        ]

    def _result(self, before: Plan, found: Plan) -> LayerRecompute:
        costs = {j: way.cost for j, way in self._ways.items()}
        partitions = range(found.n_partitions)
        runs = tuple(sorted(self._runs(), key=lambda run: run.start))
        return LayerRecompute(
            runs=runs,
            plan=replace(found, runs=runs),
            before=before,
            recompute_times=tuple(self._seconds(j, costs.get(j, 0)) for j in partitions),
            lower_bounds=tuple(self._seconds(j, self._lower_bounds.get(j, 0)) for j in partitions),
        )
