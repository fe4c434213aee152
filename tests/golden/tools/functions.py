"""Functions as users of TRL write them, for the schemas that a chat template gets. See scripts/golden_tools.py."""
from enum import Enum
from typing import Any, Dict, List, Literal, Optional, Union


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


async def search(query: str, limit: int = 5, exact: bool = False) -> list[str]:
    """Looks a text up.

    It has a second paragraph.

    Args:
        query: What to look for: words,
            or a whole sentence
            over lines.
        limit: Most results.
        exact: Whether words count as they are.

    Returns:
        The results, the best first,
        each a text.

    Raises:
        ValueError: For an empty query.
    """
    return [query]


def containers(
    names: List[str], table: Dict[str, float], pair: tuple[int, str], anything: Any, bare: list, plain: dict
) -> dict[str, list[int]]:
    """
    Takes containers.

    Args:
        names: Names.
        table: A table.
        pair: Two values.
        anything: What you like.
        bare: A list of anything.
        plain: An object.
    """
    return {}


def unions(
    a: Optional[int] = None, b: Union[int, str] = 1, c: int | None = None, d: Union[int, List[str], None] = None, e: float | int = 0
):
    """
    Takes one of several types.

    Args:
        a: May be left out.
        b: A number or text.
        c: May be left out, too.
        d: A number, or texts.
        e: A number.
    """


def choices(unit: Literal["c", "f"], colour: Colour, drink: str, mixed: Literal[1, "two", None] = None) -> object:
    """
    Takes one of several values.

    Args:
        unit: The unit.
        colour: The colour.
        drink: The drink (choices: ["tea", "coffee"])
        mixed: Anything of these.

    Returns:
        Nothing that has a schema.
    """


def nothing() -> None:
    """Takes nothing."""


class Counter:
    """An environment, of which public methods are tools."""

    def reset(self, **row):
        return None

    def move(self, by: int, why: str = "") -> str:
        """
        Moves.

        Args:
            by: How far.
            why: The reason.

        Returns:
            Where it is.
        """
        return ""


FUNCTIONS = [multiply, search, containers, unions, choices, nothing, Counter().move]
