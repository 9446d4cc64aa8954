"""Serving: an engine with continuous batching over paged latents and fixed-size states, and an OpenAI-like server.

Five nouns: a request (request.py), pages (pages.py: the latents of its tokens), states (states.py: what its KDA layers
remember, and snapshots of it), the scheduler (scheduler.py: who computes what in the next step, with job.py, prefix.py
and the plan it makes in plan.py) and the engine (engine.py: one step after another). Read them in this order. Nothing
is imported here, so that the data types can be used without torch.
"""
