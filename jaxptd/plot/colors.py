"""The colors of all pictures; lines, areas and text are legible on light and on dark pages.

`style.py` needs matplotlib, these do not: the masks of images and tables in a terminal have them.
"""

BLUE, ORANGE, GREEN, PURPLE = "#2b6cb0", "#c05621", "#2f855a", "#805ad5"
PINK, SKY, AMBER = "#b83280", "#4299e1", "#b7791f"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, PINK, SKY, AMBER)
INK = "#718096"  # text and lines

# Operations of a pipeline, below dark text.
FORWARD, BACKWARD, WEIGHTS = SKY, "#38a169", "#dd6b20"

FILLS = ("#bee3f8", "#feebc8", "#c6f6d5", "#e9d8fd")  # below dark text
DARK = "#1a202c"  # text on fills
