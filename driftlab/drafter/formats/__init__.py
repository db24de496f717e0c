"""Drafter checkpoints of other projects: finding the files, naming the tensors, saying what they mean, writing them.

``files`` opens a folder, a file or a hub id without reading the data (``hub`` downloads, ``tensorfiles`` reads single files,
``packed`` knows quantised ones); ``names`` turns the tensors' names into the drafter's own. What the settings mean is said by
``reading`` and the modules that it calls; ``export`` and ``rules`` are the way back.
"""
