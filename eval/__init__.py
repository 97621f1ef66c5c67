"""Served and offline measurement, statistics, the verdict and its report. Imports only `pairing`."""
