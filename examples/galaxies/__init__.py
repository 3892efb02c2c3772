"""Pretrained score networks of astronomical images as a model family without text or attention.

    bash examples/galaxies/run.sh    # installs the weights, trains for minutes on a CPU, shows the pictures

README.md describes the model, the rewards and the results.
"""

CLASS_NAMES = ("GalaxyScoreNet", "GalaxyPixels")
