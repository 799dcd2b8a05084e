# SPDX-License-Identifier: Apache-2.0
"""The endpoints, one file for each family of them."""
