"""The tool of configs/calculator.toml."""


def add(a: int, b: int) -> int:
    """
    Adds two whole numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        Their sum.
    """
    return a + b
