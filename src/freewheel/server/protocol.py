# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 by httptools, with a limit on what stands before a body."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)
ONE_READ = 1 << 18
"""Bytes that may come at once: where a head ends in them is known only behind the parser."""


def bounded_protocol(max_header_bytes: int) -> type[HttpToolsProtocol]:
    """A protocol that refuses a request line and headers that are longer, and holds no more."""

    class BoundedProtocol(HttpToolsProtocol):
        in_head = True
        head_bytes = 0
        is_refused = False

        def data_received(self, data: bytes) -> None:
            if self.in_head:
                self.head_bytes += len(data)
                if self.head_bytes > max_header_bytes + ONE_READ:
                    self.refuse()
            if not self.is_refused:
                super().data_received(data)

        def on_message_begin(self) -> None:
            self.in_head, self.head_bytes = True, 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self.in_head = False
            total = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if total > max_header_bytes:
                self.refuse()
            else:
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if not self.is_refused:
                super().on_body(body)

        def on_message_complete(self) -> None:
            if not self.is_refused:
                super().on_message_complete()

        def refuse(self) -> None:
            self.is_refused = True
            self.transport.write(REFUSAL)
            self.transport.close()

    return BoundedProtocol
