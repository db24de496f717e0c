"""Checkpoints of the Hugging Face hub: one commit of a repository, of which only the files that are read are downloaded.

The work is done by huggingface_hub, so its cache and its variables hold (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE). The
revision is resolved once, when config.json is fetched; everything else is taken from that commit. Headers of safetensors files
are read over the network before any of their data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)
from torch import Tensor

from driftlab.drafter.formats.files import Folder
from driftlab.drafter.formats.tensorfiles import Info, TensorFile, broken, open_tensors
from driftlab.errors import DriftlabError

# its first base is the error of the HTTP library below, which has had three names so far
_HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
_NOT_REACHED = "the hub was not reached: check the network, the proxy, HF_ENDPOINT and HF_HUB_OFFLINE"
_UNREACHABLE = (_HTTP_ERROR, OfflineModeIsEnabled, OSError)


class HubFolder(Folder):
    """One commit of a repository.

    Args:
        repo: "owner/name".
        revision: branch, tag or commit; None: main.

    Raises:
        DriftlabError: it is not there, not to be had without asking, or neither reachable nor cached.
    """

    def __init__(self, repo: str, revision: str | None) -> None:
        self.repo, self.revision = repo, revision
        self._config = self._download("config.json", revision)
        self.path = self._config.parent
        self.commit = self.path.name
        self.label = f"{repo}@{self.commit}"

    @cached_property
    def _listed(self) -> list[str] | None:
        """Names of the commit's files; None where the hub does not say, because it is not reached."""
        try:
            siblings = HfApi().model_info(self.repo, revision=self.commit).siblings
        except _UNREACHABLE:
            return None
        return None if siblings is None else sorted(sibling.rfilename for sibling in siblings)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is worth knowing, in words."""
        if self._listed is not None:
            return ()
        return (f"the hub was not reached: {self.label} is what the cache {self.path} has of it",)

    def listing(self) -> list[str]:
        """See :class:`Folder`."""
        return sorted(entry.name for entry in self.path.iterdir()) if self._listed is None else self._listed

    def find(self, name: str) -> Path | None:
        """See :class:`Folder`; downloads the file."""
        return self._download(name, self.commit) if self.has(name) else None

    def tensors(self, name: str) -> TensorFile:
        """See :class:`Folder`; of a safetensors file, only the header is fetched at first."""
        if self._listed is not None and name not in self._listed:
            raise DriftlabError(f"{self.label} has no {name}, though its index names it: the repository is incomplete")
        if self._cached(name) is None and self._listed is None:
            raise DriftlabError(
                f"{name} of {self.label} is not in the cache {constants.HF_HUB_CACHE}, and {_NOT_REACHED}"
            )
        if self._cached(name) is None and name.endswith(".safetensors"):
            return RemoteTensors(self, name)
        return open_tensors(self._download(name, self.commit))

    def header(self, name: str) -> dict[str, Info]:
        """Read the header of a safetensors file over the network."""
        with _in_words(self.repo, self.commit, name):
            try:
                header = HfApi().parse_safetensors_file_metadata(self.repo, name, revision=self.commit)
            except SafetensorsParsingError as error:
                raise broken(Path(f"{self.label}/{name}"), "safetensors", error) from error
        return {key: Info(info.dtype, tuple(info.shape)) for key, info in header.tensors.items()}

    def download(self, name: str) -> Path:
        """Return the file in the cache, after downloading it if need be."""
        return self._download(name, self.commit)

    def _cached(self, name: str) -> str | None:
        found = try_to_load_from_cache(self.repo, name, revision=self.commit)
        return found if isinstance(found, str) else None

    def _download(self, name: str, revision: str | None) -> Path:
        with _in_words(self.repo, revision, name):
            return Path(hf_hub_download(self.repo, name, revision=revision))


class RemoteTensors(TensorFile):
    """A safetensors file of the hub: its header is read at once, its data is downloaded with the first tensor."""

    def __init__(self, folder: HubFolder, name: str) -> None:
        self.folder, self.name = folder, name

    @cached_property
    def infos(self) -> dict[str, Info]:
        """See :class:`TensorFile`."""
        return self.folder.header(self.name)

    @cached_property
    def _local(self) -> TensorFile:
        return open_tensors(self.folder.download(self.name))

    def tensor(self, name: str) -> Tensor:
        """See :class:`TensorFile`."""
        return self._local.tensor(name)


@contextmanager
def _in_words(repo: str, revision: str | None, name: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into a DriftlabError that says what to do."""
    try:
        yield
    except (*_UNREACHABLE, EntryNotFoundError, HFValidationError) as error:
        raise DriftlabError(_words(error, repo, revision or "main", name)) from error


def _words(error: Exception, repo: str, revision: str, name: str) -> str:
    site = constants.ENDPOINT
    # a gated repository is a kind of one that is not found, and a file that is not cached a kind of one that is not there
    if isinstance(error, GatedRepoError):
        return f"{repo} is gated: ask for access at {site}/{repo}, then log in (`hf auth login`, or set HF_TOKEN)"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"there is neither a local folder {repo} nor a repository of that name at {site}: check the spelling; "
            "for a private one log in (`hf auth login`, or set HF_TOKEN)"
        )
    if isinstance(error, RevisionNotFoundError):
        return (
            f"{repo} has no revision {revision!r}: give a branch, a tag or a whole commit id that {site}/{repo} lists"
        )
    if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        return _unreachable(error, repo, name)
    if isinstance(error, EntryNotFoundError):
        return f"{repo}@{revision} has no {name}: a drafter has config.json and weights; is it the right repository?"
    if isinstance(error, HFValidationError):
        return f"{repo} is neither a local folder nor a name that a repository can have ({error})"
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        advice = "log in (`hf auth login`, or set HF_TOKEN)" if status in (401, 403) else "try again later"
        return f"{repo}@{revision}: {site} answered {status} for {name} ({_first_line(error)}): {advice}"
    return (
        f"{repo}@{revision}: the download of {name} failed ({_first_line(error)}); what was finished before is kept "
        f"in {constants.HF_HUB_CACHE}: check network and disk, and run the same again"
    )


def _unreachable(error: Exception, repo: str, name: str) -> str:
    cached = f"{name} of {repo} is not in the cache {constants.HF_HUB_CACHE}"
    if constants.HF_HUB_OFFLINE:
        return f"{cached}, and HF_HUB_OFFLINE forbids downloading it: unset it, or give the path of a local folder"
    cause = error.__cause__ or error
    return (
        f"there is no local folder {repo}; as a repository: {cached}, and {constants.ENDPOINT} cannot be reached "
        f"({_first_line(cause)}): check the network, the proxy and HF_ENDPOINT, or give the path of a local folder"
    )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
