"""What is read of machine code, and shown of it."""

from bench.roofline import kernels_table
from tests.verify.model.gpu.compiled.compiling import inner_loop

CODE = """
.L_x_0:
        /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
.L_x_1:
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/              @!P5 BRA `(.L_x_1) ;
.L_x_2:
        /*0040*/              @!P5 BRA `(.L_x_2) ;
        /*0050*/              @!P6 BRA `(.L_x_0) ;
        /*0060*/                   EXIT ;
"""


def test_of_nested_loops_the_one_of_products_is_read() -> None:
    assert inner_loop(CODE) == ["HMMA.16816.F32.BF16 R4, R8, R12, R4 ", "@!P5 BRA `(.L_x_1) "]
    assert len(inner_loop(CODE.replace("HMMA", "FFMA"))) == 6


def test_cards_with_equal_kernels_share_a_column() -> None:
    sizes = {"registers": 96, "spilled_bytes": 8, "barriers": 2}
    rows = [{"kernel": "product", "capability": each, **sizes, "instructions_per_weight": 4.96} for each in (80, 86, 90)]
    rows += [{"kernel": "scan", "capability": each, **sizes, "instructions_per_weight": 0.0} for each in (80, 86)]
    assert kernels_table({"kernels": rows}, {"kernels": rows[2:3]}).splitlines() == [
        "| kernel | 8.0, 8.6 | 9.0 |",
        "|---|---|---|",
        "| product | 96+8/2/5.0 | 96+8/2/5.0→96+8/2/5.0 |",
        "| scan | 96+8/2 |  |",
    ]
