"""``environment.name = "python-repository"``: change a repository so that hidden tests pass."""

from pearl.envs.repository.environment import RepositoryEnvironment

__all__ = ["RepositoryEnvironment"]
