"""Text in any script: matplotlib's own font knows Latin, Greek, Cyrillic and little more."""

import functools
import warnings


def families(text):
    """Font families that between them can draw ``text``: the configured ones, then others that are installed.

    matplotlib looks a character up in one after the other. A character that no font has is drawn as a box,
    with a warning here that says so.
    """
    import matplotlib as mpl
    from matplotlib import font_manager

    chosen = list(mpl.rcParams["font.family"])
    have = set()
    for path in {font_manager.findfont(font_manager.FontProperties(family=[family])) for family in chosen}:
        have |= _characters(path)
    missing = {c for c in text if not c.isspace() and ord(c) not in have}
    if not missing:
        return chosen
    for font in sorted(font_manager.fontManager.ttflist, key=lambda font: (font.weight != 400, font.name)):
        if font.name.startswith("Last Resort"):  # has every character, as a box
            continue
        found = {c for c in missing if ord(c) in _characters(font.fname)}
        if found and font.name not in chosen:
            chosen.append(font.name)
            missing -= found
            if not missing:
                return chosen
    warnings.warn(
        f"no installed font has {', '.join(sorted(missing)[:8])}: they are drawn as boxes. For Chinese, "
        "Japanese and Korean install a font such as Noto Sans CJK; a file of one becomes known by "
        "matplotlib.font_manager.fontManager.addfont(path)",
        stacklevel=3,
    )
    return chosen


@functools.cache
def _characters(path):
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(path).get_charmap())
    except (OSError, RuntimeError):  # a file that is gone or of a format that FreeType does not read
        return frozenset()
