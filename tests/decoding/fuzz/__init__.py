# SPDX-License-Identifier: Apache-2.0
"""Random `generate` calls: `arguments` draws them, `calls` makes them, `compare` says what must be equal."""
