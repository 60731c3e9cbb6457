"""What a run reports of itself: summary.json at its end, and its status at any moment."""

import msgspec

from pearl.core.pipeline.training import Training
from pearl.core.state import CoreState
from pearl.types.config import Config
from pearl.types.gpu_table import POOLS, TRAINING, GpuRow
from pearl.types.worker_table import WorkerRow

Summary = dict[str, int | float | str | bool | list[list[int]] | None]


def summarize(state: CoreState, training: Training, config: Config, now: float) -> Summary:
    counters = state.counters
    unfinished = [t for t in state.rollout.trajectories.values() if t.phase != "trained"]
    unfinished_turns = [turn for trajectory in unfinished for turn in trajectory.turns]
    summary: Summary = {
        "complete": state.trainer.step >= state.rollout.buffer.num_steps > 0,
        "steps": state.trainer.step,
        "seconds": now - state.first_now,
        "staleness_bound": config.rollout.staleness_bound,
        "start": config.rollout.start,
        "router": config.rollout.router,
        "update_mode": config.rollout.update_mode,
        "batch_size": config.data.batch_size,
        "group_size": config.data.group_size,
        "prompts_trained_twice": training.prompts_trained_twice,
        "prompts_lost": training.prompts_lost,
        "tokens_unfinished": sum(t.generated_tokens for t in unfinished if t.evaluation is None),
        "prefilled_unfinished": sum(turn.prefilled_tokens for turn in unfinished_turns),
        "reprefilled_unfinished": sum(turn.reprefilled_tokens for turn in unfinished_turns),
        "evaluation_tasks": state.num_evaluation_tasks,
        "lineages": [[restore.lineage, restore.step] for restore in state.lineages.restores],
    }
    summary.update(msgspec.structs.asdict(counters))
    return summary


def status(state: CoreState, now: float) -> dict[str, object]:
    version = None if state.published is None else state.published.version.step
    trainer, buffer = state.trainer, state.rollout.buffer
    cohort = buffer.cohorts.get(trainer.step)
    return {
        "step": trainer.step,
        "num_steps": buffer.num_steps,
        "step_seconds": trainer.step_seconds,
        "reward_mean": state.counters.reward_last,
        "finished": 0 if cohort is None else cohort.finished,
        "batch_size": buffer.prompts_per_step * buffer.group_size if cohort is None else cohort.num_members,
        "weight_version": version,
        "trainer": trainer.status,
        "in_flight": state.rollout.in_flight,
        "workers": [_row_status(row) for row in state.table.rows.values()],
        "gpus": [_gpu_status(row, now) for row in state.elastic.gpu_table.rows.values()],
    }


def _gpu_status(row: GpuRow, now: float) -> dict[str, object]:
    holder = "training" if row.holder == TRAINING else None if row.holder is None else f"slot {row.holder}"
    return {
        "gpu": row.gpu,
        "host": row.host,
        "pool": POOLS[row.zone],
        "zone": row.zone,
        "present": row.present,
        "holder": holder,
        "reclaiming": row.reclaim_deadline_s is not None,
        "reclaim_seconds_left": None
        if row.reclaim_deadline_s is None
        else max(0.0, row.reclaim_deadline_s - now),
    }


def _row_status(row: WorkerRow) -> dict[str, object]:
    return {
        "slot": row.slot,
        "incarnation": row.incarnation,
        "role": row.role,
        "zone": row.zone,
        "activity": row.activity,
        "condition": row.status,
        "gpus": list(row.gpus),
        "weight_version": None if row.version is None else row.version.step,
        "host": row.host,
        "pid": row.pid,
        "running": row.running,
    }
