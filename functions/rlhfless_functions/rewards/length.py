"""Length shaping: DAPO's soft over-long punishment (arXiv 2503.14476, equation 13)."""


def soft_overlong(length: int, longest: int, buffer: int) -> float:
    """Return 0 up to `longest − buffer` tokens, then linearly down to −1 at `longest`.

    Args:
        length: tokens of the response, EOS included.
        longest: most tokens that a response may have.
        buffer: width of the slope in tokens.
    """
    excess = length - (longest - buffer)
    return -min(max(excess / buffer, 0.0), 1.0)
