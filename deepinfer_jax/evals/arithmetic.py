"""Digit-wise traces of sums, differences and products: what the demo model writes while it thinks.

    347+285           632-285           47*6
    7+5+0=12          12-5-0=7          7*6+0=42
    4+8+1=13          13-8-1=4          4*6+4=28
    3+2+1=6           6-2-1=3

Lowest digits first; the third number of a line is the carry (or the borrow) of the line before.
"""

from __future__ import annotations


def _digits(a: int, b: int) -> list[tuple[int, int]]:
    """Pairs of digits, lowest first, as many as the longer number has."""
    count = max(len(str(a)), len(str(b)))
    return [(a // 10**i % 10, b // 10**i % 10) for i in range(count)]


def add_lines(a: int, b: int) -> list[str]:
    """Lines of a+b, both at least 0."""
    lines, carry = [], 0
    for x, y in _digits(a, b):
        total = x + y + carry
        lines.append(f"{x}+{y}+{carry}={total}")
        carry = total // 10
    return lines


def subtract_lines(a: int, b: int) -> list[str]:
    """Lines of a-b, 0 <= b <= a."""
    lines, borrow = [], 0
    for x, y in _digits(a, b):
        lent = x - y - borrow < 0
        x += 10 * lent
        lines.append(f"{x}-{y}-{borrow}={x - y - borrow}")
        borrow = int(lent)
    return lines


def multiply_lines(a: int, b: int) -> list[str]:
    """Lines of a*b, b one digit."""
    lines, carry = [], 0
    for digit in map(int, reversed(str(a))):
        product = digit * b + carry
        lines.append(f"{digit}*{b}+{carry}={product}")
        carry = product // 10
    return lines


def evaluate(a: int, sign: str, b: int) -> int:
    """a+b, a-b or a*b."""
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


def trace(a: int, sign: str, b: int, effort: int) -> str:
    """Reasoning at an effort of 1 to 100: up to 33 none, up to 66 the lines, above also a check.

    The check of a sum takes one number away again, that of a difference adds it back, that of a product repeats it.
    """
    if effort <= 33:
        return ""
    lines = {"+": add_lines, "-": subtract_lines, "*": multiply_lines}[sign](a, b)
    if effort > 66:
        result = evaluate(a, sign, b)
        if sign == "+":
            lines += [f"check {result}-{b}", *subtract_lines(result, b), f"={a}"]
        elif sign == "-":
            lines += [f"check {result}+{b}", *add_lines(result, b), f"={a}"]
        else:
            lines += [f"check {a}*{b}", *multiply_lines(a, b), f"={result}"]
    return "\n".join(lines)
