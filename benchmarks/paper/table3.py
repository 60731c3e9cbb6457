"""Table 3: what reconfiguration takes; the runs are those of Fig. 5."""

from benchmarks.paper import published
from benchmarks.paper.fig5 import SEGMENTS, run_of, seeds
from benchmarks.paper.figure import Figure, Module, Scale, Table, estimate, shown
from benchmarks.paper.runner import HARDWARE, MODELS, Run, Runs
from pearl.sim.hardware import load


def plan(scale: Scale) -> list[Run]:
    return [
        run_of(model, s, "pearl", seed) for model in MODELS for seed in seeds(scale, model) for s in SEGMENTS
    ]


def evaluate(runs: Runs, scale: Scale) -> Figure:
    rows = []
    for operation in published.COSTS:
        row = [operation]
        for model in MODELS:
            costs = load(HARDWARE[model]).costs
            results = [
                outcome.result
                for outcome in runs.of(
                    run_of(model, s, "pearl", seed) for s in SEGMENTS for seed in seeds(scale, model)
                )
            ]
            measured = {
                "activation": [r.activation_seconds for r in results if r.borrows],
                "deactivation": [r.deactivation_seconds for r in results if r.borrows],
            }.get(operation)
            ours = (
                f"{getattr(costs, operation):.2f} (input)"
                if measured is None
                else shown(estimate(measured), 2)
            )
            row += [ours, f"{published.COSTS[operation][model]}"]
        rows.append(row)
    return Figure(
        name="table3",
        title="Table 3: seconds of reconfiguration",
        parameters="as Fig. 5, policy pearl, means over all runs",
        tables=[
            Table(
                header=["operation", *(text for name in MODELS.values() for text in (name, "paper"))],
                rows=rows,
            )
        ],
        remarks=[
            "The paper's table is the simulator's input. Activation and deactivation are measured in the "
            "runs: activation is "
            "longer by the switch of workers that come back in another role before they serve.",
        ],
    )


MODULE = Module("table3", plan, evaluate)
