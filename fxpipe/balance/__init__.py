"""Solvers: costs in, cuts out. They know no torch and no graph."""
