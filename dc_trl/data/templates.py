"""Prompt templates: how a problem is put to a model."""

# The wording of Qwen2.5-Math's evaluation, which the Qwen models know.
BOXED_INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."


def chat_prompt(problem: str, instruction: str | None = BOXED_INSTRUCTION) -> list[dict[str, str]]:
    """One user message, for a model with a chat template; the bare problem without an ``instruction``."""
    content = problem if not instruction else f"{problem}\n\n{instruction}"
    return [{"role": "user", "content": content}]


def base_prompt(problem: str, instruction: str | None = BOXED_INSTRUCTION) -> str:
    """Text that a base model continues with a solution; the bare problem without an ``instruction``."""
    return problem if not instruction else f"Problem: {problem}\n\n{instruction}\n\nSolution:"
