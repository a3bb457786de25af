"""Platforms: described in every form, detected from files of machines that are not here, refused with found and needed."""

from __future__ import annotations

import importlib.util
import json
import pickle
from pathlib import Path

import pytest

from attn_core.errors import PlatformError
from attn_core.platform import LDS_BYTES, Platform, _detect, _nvml, detect_platform, parse_platform
from attn_core.platform._detect import Machine, detect

# --- descriptions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("description", "identity", "vendor"),
    [
        ("cuda:sm90", "cuda:sm90", "nvidia"),
        ("cuda:90", "cuda:sm90", "nvidia"),
        ("cuda:9.0", "cuda:sm90", "nvidia"),
        ("cuda:sm_100a", "cuda:sm100", "nvidia"),
        ("sm121", "cuda:sm121", "nvidia"),
        ("rocm:gfx942", "rocm:gfx942", "amd"),
        ("rocm:gfx90a:sramecc+:xnack-", "rocm:gfx90a", "amd"),
        ("gfx1100", "rocm:gfx1100", "amd"),
        ("npu", "npu:a2", "ascend"),
        ("npu:a3", "npu:a3", "ascend"),
        ("xpu", "xpu", "intel"),
        ("cpu", "cpu", "cpu"),
        ("cpu:amx", "cpu:amx", "cpu"),
        ("cpu,amx=true", "cpu:amx", "cpu"),
        ({"device": "cuda", "sm": 121, "cuda": "13.0"}, "cuda:sm121", "nvidia"),
        ({"device": "rocm", "gfx": "gfx950"}, "rocm:gfx950", "amd"),
        ({"device": "cpu", "amx": False}, "cpu", "cpu"),
        ({"device": "cpu", "amx": True}, "cpu:amx", "cpu"),
        ('{"device": "xpu"}', "xpu", "intel"),
    ],
)
def test_forms(description: object, identity: str, vendor: str) -> None:
    platform = parse_platform(description)  # type: ignore[arg-type]
    assert platform.id == identity
    assert platform.axes()["vendor"] == vendor
    assert platform.axes()["arch"] == platform.arch == identity.rpartition(":")[2]
    assert parse_platform(identity) == parse_platform(platform.id)
    assert parse_platform(json.dumps(platform.to_dict())) == platform
    assert parse_platform(platform) is platform
    assert pickle.loads(pickle.dumps(platform)) == platform
    assert isinstance(hash(platform), int)


def test_details() -> None:
    text = "cuda:sm90,cuda=13.0,driver=580.95,triton=3.6.0,library.torch=2.11,name=NVIDIA H200,memory=141GiB,lds=99KiB"
    platform = parse_platform(text)
    assert str(platform) == "cuda:sm90 (NVIDIA H200, CUDA 13.0)"
    assert platform.axes() == {
        "vendor": "nvidia",
        "arch": "sm90",
        "lds_bytes": 101376,
        "cuda": "13.0",
        "driver": "580.95",
        "library.triton": "3.6.0",
        "library.torch": "2.11",
    }
    assert platform.memory_bytes == 141 << 30
    assert str(parse_platform("rocm:gfx942,rocm=7.0")) == "rocm:gfx942 (ROCM 7.0)"
    assert parse_platform({"device": "cuda", "sm": 121, "smem_per_block": 65536}).lds_bytes == 65536


@pytest.mark.parametrize(
    ("arch", "lds"),
    [("sm90", 227 * 1024), ("sm121", 99 * 1024), ("sm80", 163 * 1024), ("gfx942", 65536), ("gfx950", 160 * 1024)],
)
def test_shared_memory_of_known_architectures(arch: str, lds: int) -> None:
    assert parse_platform(arch).lds_bytes == lds == LDS_BYTES[arch]


def test_unknown_architectures_have_unknown_sizes() -> None:
    assert "lds_bytes" not in parse_platform("sm200").axes()


@pytest.mark.parametrize(
    ("description", "found", "needed"),
    [
        ("", "''", "cuda:sm90"),
        ("tpu", "'tpu'", "cuda, rocm, npu, xpu, cpu"),
        ("cuda", "cuda", "needs an architecture such as sm90"),
        ("rocm", "rocm", "gfx942"),
        ("cuda:hopper", "'hopper'", "sm90"),
        ("rocm:mi300", "'mi300'", "gfx942"),
        ("cpu:avx", "'avx'", "amx"),
        ("cuda:sm90,fast", "'fast'", "key=value"),
        ("cuda:sm90,cuda=12,cuda=13", "'cuda'", "given twice"),
        ("cuda:sm90,colour=red", "['colour']", "unknown key"),
        ("cuda:sm90,cuda=new", "'new'", "such as 13.0"),
        ("cuda:sm90,lds=big", "'big'", "such as 101376"),
        ("cuda:sm90,amx=true", "amx", "property of CPUs"),
        ("cpu,amx=maybe", "'maybe'", "true or false"),
        ('{"device": ', "device", "not valid JSON"),
        ("[1]", "[1]", "is not one of"),
        ({"device": "cuda", "sm": 90, "arch": "sm90"}, "arch and sm", "both name"),
        ({"device": "cuda", "sm": 90, "versions": 3}, "versions=3", "not a table"),
        ({"device": "cuda", "sm": 90, "others": "cpu"}, "others='cpu'", "not a list"),
        ({"sm": 90}, "None", "is not one of"),
        (90, "90", "cuda:sm90"),
    ],
)
def test_bad_descriptions_say_found_and_needed(description: object, found: str, needed: str) -> None:
    with pytest.raises(PlatformError) as caught:
        parse_platform(description)  # type: ignore[arg-type]
    text = str(caught.value)
    assert found in text
    assert needed in text
    assert "needed   " in text


def test_rules_of_the_vendor() -> None:
    turing = parse_platform({"device": "cuda", "sm": 75, "name": "Tesla T4"})
    reason = turing.refuses("bf16")
    assert reason is not None
    assert "Tesla T4 (sm75)" in str(reason)
    assert "sm80" in str(reason)
    assert "bfloat16" in str(reason)
    assert reason.fix == "--dtype float16"
    assert turing.refuses("fp16") is None
    assert parse_platform("sm80").refuses("bf16") is None
    assert parse_platform("rocm:gfx942").refuses("bf16") is None


# --- detection ----------------------------------------------------------------------------------------------------------

H200 = "NVIDIA H200, 9.0, 580.95.05, 143771, GPU-aaa"
T4 = "Tesla T4, 7.5, 580.95.05, 15360, GPU-bbb"


class Fake(Machine):
    """A machine made of files and command outputs."""

    def __init__(
        self, root: Path, files: dict[str, str], commands: dict[str, str] | None = None, **environ: str
    ) -> None:
        super().__init__(root, environ)
        self.commands = commands or {}
        for path, text in files.items():
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)

    def command(self, *words: str) -> str:
        return self.commands.get(words[0], "")


CPUINFO = "model name\t: Fast CPU\nflags\t\t: fpu avx512f {}\n"
MI300 = "cpu_cores_count 0\nsimd_count 304\nlds_size_in_kb 64\ngfx_target_version 90402\n"


@pytest.fixture(autouse=True)
def no_installed_software(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_detect, "_torch_versions", lambda device: {})
    monkeypatch.setattr(_detect, "_library", lambda name: {})


def test_cpu(tmp_path: Path) -> None:
    plain = detect(machine=Fake(tmp_path, {"proc/cpuinfo": CPUINFO.format(""), "proc/meminfo": "MemTotal:  1024 kB\n"}))
    assert str(plain) == "cpu (Fast CPU)"
    assert plain.memory_bytes == 1 << 20
    amx = detect(machine=Fake(tmp_path, {"proc/cpuinfo": CPUINFO.format("amx_bf16 amx_tile amx_int8")}))
    assert amx.id == "cpu:amx"
    assert amx.amx


def test_c104_several_platforms(tmp_path: Path) -> None:
    """By flag, else by order; the record says what else is there and who chose."""
    commands = {"nvidia-smi": H200}
    platform = detect(machine=Fake(tmp_path, {}, commands))
    assert platform.id == "cuda:sm90"
    assert platform.others == ("cpu",)
    assert platform.chosen_by.startswith("first of cuda")
    chosen = detect("cpu", Fake(tmp_path, {}, commands))
    assert chosen.device == "cpu"
    assert chosen.others == ("cuda",)
    assert chosen.chosen_by == "asked for cpu"
    with pytest.raises(PlatformError, match="no rocm device") as caught:
        detect("rocm", Fake(tmp_path, {}, commands))
    assert "cuda:sm90 (NVIDIA H200)" in str(caught.value)
    with pytest.raises(PlatformError, match="not a device"):
        detect("tpu")


def test_cuda_devices(tmp_path: Path) -> None:
    two = {"nvidia-smi": f"{H200}\n{T4}\nnonsense\n"}
    platform = detect(machine=Fake(tmp_path, {}, two))
    assert platform.arch == "sm90"
    assert platform.versions == {"driver": "580.95.05"}
    assert platform.memory_bytes == 143771 << 20
    assert any("different architectures: sm75, sm90" in note for note in platform.notes)
    assert detect("cuda:1", Fake(tmp_path, {}, two)).arch == "sm75"
    assert detect(machine=Fake(tmp_path, {}, two, CUDA_VISIBLE_DEVICES="1")).arch == "sm75"
    assert detect(machine=Fake(tmp_path, {}, two, CUDA_VISIBLE_DEVICES="GPU-bbb,0")).arch == "sm75"
    assert detect("cuda:1", Fake(tmp_path, {}, two, CUDA_VISIBLE_DEVICES="1,0")).arch == "sm90"
    hidden = detect(machine=Fake(tmp_path, {}, two, CUDA_VISIBLE_DEVICES=""))
    assert hidden.device == "cpu"
    assert "CUDA_VISIBLE_DEVICES hides every device" in hidden.notes
    missing = detect(machine=Fake(tmp_path, {}, two, CUDA_VISIBLE_DEVICES="7"))
    assert missing.device == "cpu"
    assert any("no device 0 among 2" in note for note in missing.notes)


def test_a_gpu_that_does_not_answer_is_noted(tmp_path: Path) -> None:
    platform = detect(machine=Fake(tmp_path, {"dev/nvidia0": ""}))
    assert platform.device == "cpu"
    assert any("neither NVML nor nvidia-smi answers" in note for note in platform.notes)


def test_rocm(tmp_path: Path) -> None:
    nodes = "sys/class/kfd/kfd/topology/nodes"
    files = {
        f"{nodes}/0/properties": "cpu_cores_count 96\ngfx_target_version 0\n",
        f"{nodes}/1/properties": MI300,
        f"{nodes}/1/mem_banks/0/properties": "heap_type 1\nsize_in_bytes 206141652992\n",
        f"{nodes}/10/properties": MI300.replace("90402", "90010"),
        "opt/rocm/.info/version": "7.0.2-56\n",
        "sys/class/drm/card1/device/product_name": "AMD Instinct MI300X\n",
    }
    platform = detect(machine=Fake(tmp_path, files))
    assert str(platform) == "rocm:gfx942 (AMD Instinct MI300X, ROCM 7.0.2)"
    assert platform.lds_bytes == 65536
    assert platform.memory_bytes == 206141652992
    assert detect("rocm:1", Fake(tmp_path, files)).arch == "gfx90a"
    assert detect("cuda:1", Fake(tmp_path, files)).id == "rocm:gfx90a"  # torch's name for it
    assert detect(machine=Fake(tmp_path, files, HIP_VISIBLE_DEVICES="1")).arch == "gfx90a"


@pytest.mark.parametrize(("chip", "arch"), [("Ascend 910B3", "a2"), ("Ascend910_9392", "a3"), ("Ascend 310P3", "npu")])
def test_npu(tmp_path: Path, chip: str, arch: str) -> None:
    files = {"dev/davinci0": "", "usr/local/Ascend/driver/version.info": "Version=25.2.0\n"}
    table = f"NPU ID  Chip ID  Chip Logic ID  Chip Name\n0  0  0  {chip}\n"
    platform = detect(machine=Fake(tmp_path, files, {"npu-smi": table}))
    assert (platform.device, platform.arch) == ("npu", arch)
    assert platform.versions == {"driver": "25.2.0"}
    assert bool(platform.notes) is (arch == "npu")


def test_xpu_needs_a_torch_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"sys/class/drm/card0/device/vendor": "0x8086\n"}
    platform = detect(machine=Fake(tmp_path, files))
    assert platform.device == "cpu"
    assert any("torch is not built for it" in note for note in platform.notes)
    monkeypatch.setattr(_detect, "_torch_versions", lambda device: {"xpu": "20250201"} if device == "xpu" else {})
    assert detect(machine=Fake(tmp_path, files)).id == "xpu"


def test_a_broken_probe_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(machine: Machine, index: int) -> Platform | None:
        raise RuntimeError("driver in a bad mood")

    monkeypatch.setattr(_detect, "PROBES", {**_detect.PROBES, "rocm": broken})
    platform = detect(machine=Fake(tmp_path, {}))
    assert platform.device == "cpu"
    assert "rocm: RuntimeError: driver in a bad mood" in platform.notes


def test_versions_of_torch_are_read_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "version.py").write_text("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
    spec = importlib.util.spec_from_file_location("torch", package / "__init__.py")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert _detect._torch_versions("cuda") == {"cuda": "13.0"}
    assert _detect._torch_versions("rocm") == {}


def test_nvml_is_absent_or_answers() -> None:
    notes: list[str] = []
    for card in _nvml.query(notes):
        assert card.arch.startswith("sm")


def test_this_machine() -> None:
    platform = detect_platform()
    assert parse_platform(platform.to_dict()) == platform
    assert set(platform.axes()) >= {"vendor", "arch"}
    assert detect_platform("cpu").device == "cpu"
