"""Who carries out the core's commands: one method each, so that a command that somebody forgets is a type error.

The live executor and the simulator both implement ``CommandHandler``; ``dispatch`` is the only place that looks at
what kind a command is.
"""

from typing import Protocol, assert_never

from pearl.types import commands
from pearl.types.commands import AnyCommand


class CommandHandler(Protocol):
    """Carries out commands. Where one means nothing to a handler, its method holds only a docstring that says why."""

    def start_worker(self, command: commands.StartWorker, /) -> None: ...

    def stop_worker(self, command: commands.StopWorker, /) -> None: ...

    def update_weights(self, command: commands.UpdateWeights, /) -> None: ...

    def generate(self, command: commands.Generate, /) -> None: ...

    def abort(self, command: commands.Abort, /) -> None: ...

    def open_episode(self, command: commands.OpenEpisode, /) -> None: ...

    def step_episode(self, command: commands.StepEpisode, /) -> None: ...

    def close_episode(self, command: commands.CloseEpisode, /) -> None: ...

    def void_tokens(self, command: commands.VoidTokens, /) -> None: ...

    def truncate_tokens(self, command: commands.TruncateTokens, /) -> None: ...

    def forget_tokens(self, command: commands.ForgetTokens, /) -> None: ...

    def start_trainer(self, command: commands.StartTrainer, /) -> None: ...

    def train(self, command: commands.Train, /) -> None: ...

    def interrupt(self, command: commands.Interrupt, /) -> None: ...

    def set_role(self, command: commands.SetRole, /) -> None: ...

    def release_worker(self, command: commands.ReleaseWorker, /) -> None: ...

    def activate_worker(self, command: commands.ActivateWorker, /) -> None: ...

    def offload_training(self, command: commands.OffloadTraining, /) -> None: ...

    def restore_training(self, command: commands.RestoreTraining, /) -> None: ...

    def return_gpus(self, command: commands.ReturnGpus, /) -> None: ...

    def answer_preempt(self, command: commands.AnswerPreempt, /) -> None: ...

    def stop_trainer(self, command: commands.StopTrainer, /) -> None: ...

    def record_trajectory(self, command: commands.RecordTrajectory, /) -> None: ...

    def report(self, command: commands.Report, /) -> None: ...

    def finish(self, command: commands.Finish, /) -> None: ...


def dispatch(command: AnyCommand, handler: CommandHandler) -> None:
    """Call the handler's method for the command. The frequent commands are tried first."""
    match command:
        case commands.Generate():
            handler.generate(command)
        case commands.StepEpisode():
            handler.step_episode(command)
        case commands.RecordTrajectory():
            handler.record_trajectory(command)
        case commands.Report():
            handler.report(command)
        case commands.StartWorker():
            handler.start_worker(command)
        case commands.StopWorker():
            handler.stop_worker(command)
        case commands.UpdateWeights():
            handler.update_weights(command)
        case commands.Abort():
            handler.abort(command)
        case commands.OpenEpisode():
            handler.open_episode(command)
        case commands.CloseEpisode():
            handler.close_episode(command)
        case commands.VoidTokens():
            handler.void_tokens(command)
        case commands.TruncateTokens():
            handler.truncate_tokens(command)
        case commands.ForgetTokens():
            handler.forget_tokens(command)
        case commands.StartTrainer():
            handler.start_trainer(command)
        case commands.Train():
            handler.train(command)
        case commands.Interrupt():
            handler.interrupt(command)
        case commands.SetRole():
            handler.set_role(command)
        case commands.ReleaseWorker():
            handler.release_worker(command)
        case commands.ActivateWorker():
            handler.activate_worker(command)
        case commands.OffloadTraining():
            handler.offload_training(command)
        case commands.RestoreTraining():
            handler.restore_training(command)
        case commands.ReturnGpus():
            handler.return_gpus(command)
        case commands.AnswerPreempt():
            handler.answer_preempt(command)
        case commands.StopTrainer():
            handler.stop_trainer(command)
        case commands.Finish():
            handler.finish(command)
        case _:
            assert_never(command)
