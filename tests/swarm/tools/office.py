"""Small PDF and DOCX files, honest and hostile, made byte by byte."""

from __future__ import annotations

import io
import zipfile
import zlib

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def pdf(*pages: str, padding: int = 0) -> bytes:
    """One line of text on each page; `padding` unpacked bytes of blanks in the first one's stream."""
    objects: list[bytes] = [b"<< /Type /Catalog /Pages 2 0 R >>"]
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects.append(f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode())
    objects.append(b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    for number, text in enumerate(pages):
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 300] /Contents {5 + 2 * number} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>".encode()
        )
        stream = f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode() + b" " * (padding if number == 0 else 0)
        packed = zlib.compress(stream, 9)
        objects.append(b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(packed), packed))
    out, places = bytearray(b"%PDF-1.4\n"), []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    out += b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, table)
    return bytes(out)


def docx(*paragraphs: str, heading: str = "", xml: bytes | None = None) -> bytes:
    """Paragraphs, after a heading if there is one; `xml` is a whole document instead."""
    parts = (
        [f'<w:p><w:pPr><w:pStyle w:val="Heading1"/></w:pPr><w:r><w:t>{heading}</w:t></w:r></w:p>'] if heading else []
    )
    parts += [f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>" for text in paragraphs]
    body = f'<?xml version="1.0"?><w:document xmlns:w="{WORD}"><w:body>{"".join(parts)}</w:body></w:document>'
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
        archive.writestr("word/document.xml", body.encode() if xml is None else xml)
    return file.getvalue()


def billion_laughs() -> bytes:
    rows = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
    return docx(xml=f'<!DOCTYPE x [<!ENTITY l0 "ha">{rows}]><w:document xmlns:w="{WORD}">&l9;</w:document>'.encode())


def zip_bomb(size: int) -> bytes:
    return docx(xml=b"<a>" + b" " * size + b"</a>")


def lying_zip(size: int) -> bytes:
    """A directory that claims a small part where a large one is packed."""
    data = bytearray(zip_bomb(size))
    claimed = (1_000).to_bytes(4, "little")
    real = (size + 7).to_bytes(4, "little")
    return bytes(data.replace(real, claimed))
