"""Placements for an objective: profiles of engines, a search over them, its report and manifest."""
