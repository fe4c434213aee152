"""Rewards of configs/rewards.toml, with TRL's signature. Every column of a row comes as a list."""


def closeness(prompts, completions, answer, **columns):
    """1 for the right number, less the further off."""
    scores = []
    for completion, expected in zip(completions, answer):
        words = completion[0]["content"].split()  # the prompts are conversations, and so are the completions
        number = words[-1] if words and words[-1].isdigit() else None
        scores.append(0.0 if number is None else 1 / (1 + abs(int(number) - int(expected))))
    return scores


def variety(prompts, completions, **columns):
    """The share of different completions of a prompt, the same for all of them."""
    texts = [completion[0]["content"] for completion in completions]
    return [len(set(texts)) / len(texts)] * len(texts)
