"""What is read, and what is held out."""

import pytest

from jaxllm.errors import ValidationError
from jaxllm.training.corpus import read_corpus


def write(folder, **texts):
    for name, content in texts.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_text_is_read_and_what_is_excluded_or_no_text_is_not(tmp_path):
    folder = write(
        tmp_path / "src", a_py=b"a", b_md=b"b", c_bin=b"c", d_py=b"", e_py=b"\xff", test__f_py=b"f"
    )
    single = write(tmp_path, readme_txt=b"r") / "readme.txt"
    found = read_corpus([folder, single], exclude=["test/*"], heldout_share=0.0)
    assert [(d.name, d.text) for d in found] == [
        ("readme.txt", "r"),
        ("src/a.py", "a"),
        ("src/b.md", "b"),
    ]


def test_what_is_held_out_depends_on_names_alone(tmp_path):
    names = [f"f{i}_py" for i in range(200)]
    first = write(tmp_path / "one" / "src", **dict.fromkeys(names, b"x"))
    second = write(tmp_path / "two" / "src", **dict.fromkeys(names[::-2], b"yy"))
    heldout = {d.name for d in read_corpus([first], heldout_share=0.2) if d.is_heldout}
    assert 20 < len(heldout) < 60
    other = read_corpus([second], heldout_share=0.2)
    assert {d.name for d in other if d.is_heldout} == heldout & {d.name for d in other}
    more = {d.name for d in read_corpus([first], heldout_share=0.4) if d.is_heldout}
    assert heldout < more


def test_manifest_tells_size_and_hash(tmp_path):
    folder = write(tmp_path / "src", a_py="é".encode())
    [document] = read_corpus([folder], heldout_share=0.0)
    assert document.manifest_entry() == {
        "name": "src/a.py",
        "bytes": 2,
        "sha256": "4a99557e4033c3539de2eb65472017cad5f9557f7a0625a09f1c3f6e2ba69c4c",
        "split": "train",
    }


@pytest.mark.parametrize(
    ("sources", "share", "message"),
    [
        (["nowhere"], 0.1, "no such file or folder"),
        (["src", "src"], 0.1, "comes from two of the sources"),
        (["src"], 1.0, "heldout_share=1.0"),
        (["empty"], 0.1, "data has no text"),
    ],
)
def test_refusals(tmp_path, monkeypatch, sources, share, message):
    write(tmp_path / "src", a_py=b"a")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValidationError, match=message):
        read_corpus(sources, heldout_share=share)
