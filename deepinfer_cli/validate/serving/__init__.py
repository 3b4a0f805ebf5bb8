"""Two vLLM servers, with the accelerate ops and without, driven by vLLM's own `vllm bench serve`.

`plan` says what runs, `guard` and `process` start and end servers, `client` runs vLLM's benchmark in the target's
interpreter, `score` asks for prompt log-probabilities, `drive` puts them in order, `rows` makes the result file.
"""
