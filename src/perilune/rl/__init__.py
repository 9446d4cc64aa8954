"""Reinforcement learning from verifiable rewards: objectives, rewards over groups, and which tasks come next."""
