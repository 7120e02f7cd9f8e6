# SPDX-License-Identifier: Apache-2.0
"""Codes and scales between ranks: collectives, and what ranks agree on before them."""
