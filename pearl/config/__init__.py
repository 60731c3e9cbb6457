"""Settings from one TOML file and ``section.key=value`` overrides; nothing else is read, no environment variable.

Whatever is not a known key with a value of its type and range is refused before anything starts.
"""

from pearl.config.loading import load, resolved_json, resolved_toml
from pearl.config.schema import ConfigError
from pearl.config.validation import validate

__all__ = ["ConfigError", "load", "resolved_json", "resolved_toml", "validate"]
