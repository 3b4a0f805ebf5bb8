"""The end-to-end level: a small random V4.1 through the installed vLLM's own engine.

`plan` says what to run, `drive` starts a child for each run, `child` (with `weights`, `record` and `phases`) runs in
the interpreter that serves vLLM, `compare` holds the answers against each other. `model` writes the model's folder.
"""
