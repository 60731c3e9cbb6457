"""What SGLang looks at first for a model's architecture: its own two hundred model files it then imports only for one
that is not here, which takes longer than all else of a start on a CPU host."""
