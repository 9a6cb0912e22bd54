"""What `remanence flower` writes: an app that Flower accepts, valid certificates, and keys that
only their owner can read.
"""

from __future__ import annotations

import ssl
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from remanence.cli.main import app as command_line
from remanence.core.errors import InputError
from remanence.flower.app_files import SITE, write_app
from remanence.flower.quickstart import write_site
from remanence.flower.settings import Policy, read_site

runner = CliRunner()


def write_experiment(
    folder: Path,
    name: str = "experiment.toml",
    text: str = 'method = "fedavg"\nengine = "flower"\n',
) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_an_app_has_both_ends_and_the_experiment(tmp_path: Path) -> None:
    done = runner.invoke(
        command_line,
        ["flower", "init", str(tmp_path / "My App"), "--config", str(write_experiment(tmp_path))],
    )
    assert done.exit_code == 0
    project = tomllib.loads((tmp_path / "My App" / "pyproject.toml").read_text())
    assert project["project"]["name"] == "my-app"
    flower = project["tool"]["flwr"]["app"]
    assert flower["components"] == {
        "serverapp": "my_app_app.server_app:app",
        "clientapp": "my_app_app.client_app:app",
    }
    assert flower["config"]["experiment"] == "experiment.toml"
    assert (
        (tmp_path / "My App" / "my_app_app" / "experiment.toml")
        .read_text()
        .startswith('method = "fedavg"')
    )


def test_an_app_depends_on_flower_alone(tmp_path: Path) -> None:
    write_app(tmp_path / "ward", [write_experiment(tmp_path)])
    app = tomllib.loads((tmp_path / "ward" / "pyproject.toml").read_text())
    ours = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert app["project"]["dependencies"] == ours["project"]["optional-dependencies"]["flower"]


# Flower's own use of pathspec
@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_flower_accepts_the_app(tmp_path: Path) -> None:
    pytest.importorskip(
        "flwr", reason="the package flwr is not installed (the extra remanence-fl[flower])"
    )
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate

    write_app(tmp_path / "ward", [write_experiment(tmp_path)])
    config, complaints = load_and_validate(tmp_path / "ward" / "pyproject.toml")
    assert not complaints
    assert config["project"]["name"] == "ward"
    assert b"experiment.toml" in build_fab_from_disk(tmp_path / "ward")


def test_the_example_site_file_is_valid(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(SITE)
    example = read_site(tmp_path / "site.toml")
    assert list(example.clients) == [0]
    assert example.settings.policy == Policy()  # it shows the defaults


def test_what_cannot_become_an_app_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no experiment file at"):
        write_app(tmp_path / "a", [tmp_path / "nothing.toml"])
    with pytest.raises(InputError, match="unknown key 'metod'"):
        write_app(tmp_path / "a", [write_experiment(tmp_path, text='metod = "fedavg"')])
    assert not (tmp_path / "a").exists()
    with pytest.raises(InputError, match="exists and is not empty"):
        write_app(tmp_path, [write_experiment(tmp_path)])
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match="the same name"):
        write_app(
            tmp_path / "a", [write_experiment(tmp_path), write_experiment(tmp_path / "other")]
        )


def test_certificates_are_valid_for_their_hosts_and_keys_are_private(tmp_path: Path) -> None:
    pytest.importorskip(
        "cryptography",
        reason="the package cryptography is not installed (it comes with remanence-fl[flower])",
    )
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        load_ssh_private_key,
        load_ssh_public_key,
    )

    from remanence.flower.certificates import make_certificates, make_site_key

    make_certificates(tmp_path, ["fl.example.org", "10.0.0.5"])
    authority, server = (
        x509.load_pem_x509_certificate((tmp_path / name).read_bytes())
        for name in ("ca.crt", "server.crt")
    )
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.5"]
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    assert context.get_ca_certs()
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
        tmp_path / "server.crt", tmp_path / "server.key"
    )
    key = make_site_key(tmp_path, "ward-7")
    for private in (key, tmp_path / "server.key", tmp_path / "ca.key"):
        assert private.stat().st_mode & 0o777 == 0o600
    loaded, public = (
        load_ssh_private_key(key.read_bytes(), None),
        load_ssh_public_key(key.with_suffix(".key.pub").read_bytes()),
    )
    assert isinstance(loaded, ec.EllipticCurvePrivateKey)
    assert isinstance(loaded.curve, ec.SECP384R1)
    assert loaded.public_key() == public
    before = (tmp_path / "ca.crt").read_bytes()
    # the authority stays, so sites need nothing new
    make_certificates(tmp_path, ["new.example.org"])
    assert (tmp_path / "ca.crt").read_bytes() == before
    x509.load_pem_x509_certificate(
        (tmp_path / "server.crt").read_bytes()
    ).verify_directly_issued_by(authority)
    with pytest.raises(InputError, match="a key is not overwritten"):
        make_site_key(tmp_path, "ward-7")
    for wrong in (["fl.example.org:8000"], ["a b"], []):
        with pytest.raises(InputError):
            make_certificates(tmp_path, wrong)


def test_check_lists_what_a_site_would_send(tmp_path: Path) -> None:
    experiment = write_experiment(tmp_path, text='method = "scaffold"\n[clients]\ncount = 4\n')
    site = tmp_path / "site.toml"
    for policy, counts, loss in (
        ("suppress = 5", "it sends no counts of predictions: exact counts", False),
        ("label_counts = true\nsuppress = 5", "exact counts of correct and wrong", True),
        ("epsilon = 0.5", "epsilon 0.5 for each model and client, until 8 is spent", False),
    ):
        site.write_text(
            f'name = "trial"\n[data]\n1 = "share"\n[policy]\n{policy}\n[compute]\ndevice = "cpu"\n'
        )
        done = runner.invoke(command_line, ["flower", "check", str(site), str(experiment)])
        assert done.exit_code == 0
        assert "client 1:" in done.output
        assert "scaffold.change." in done.output
        assert counts in done.output
        assert ("those below 5 as 0" in done.output) == ("label_counts" in policy)
        assert ("the mean loss" in done.output) == loss
    site.write_text('name = "trial"\n[data]\n1 = "share"\n[policy]\nmin_examples = 9000\n')
    small = runner.invoke(command_line, ["flower", "check", str(site), str(experiment)])
    assert small.exit_code == 2
    assert "declines to train (policy): an update of client 1" in small.output
    site.write_text('name = "trial"\n[data]\n1 = "share"\n[policy]\nmethods = ["fedavg"]\n')
    refused = runner.invoke(command_line, ["flower", "check", str(site), str(experiment)])
    assert refused.exit_code == 2
    assert "declines (policy): this site accepts only fedavg" in refused.output


def test_a_quickstart_site_says_why_it_sends_label_counts(tmp_path: Path) -> None:
    path = write_site(tmp_path / "site-0", "site-0", range(2))
    assert read_site(path).settings.policy.label_counts
    assert "published digits" in path.read_text().partition("name")[0]
