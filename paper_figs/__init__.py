"""One script a figure, from the small committed tables in ``data/`` alone; no torch. ``python -m paper_figs`` draws all."""
