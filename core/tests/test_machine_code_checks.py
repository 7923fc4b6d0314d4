"""The checks that read a library's machine code find what they are for, in made-up listings."""

from stream_attention.core.native import NativeLibrary
from stream_attention.core.testing import native_library

LIBRARY = NativeLibrary("no.package", "lib.so")


def listing(monkeypatch, text):
    monkeypatch.setattr(native_library, "_cuobjdump", lambda library, *options: text)


def test_an_access_before_the_wait_is_found(monkeypatch):
    listing(
        monkeypatch,
        """
        Function : early
            /*0000*/ LDG.E R1, desc[UR4][R2.64] ;
            /*0010*/ ACQBULK ;
        Function : late
            /*0000*/ LDC R1, c[0x0][0x210] ;
            /*0010*/ ACQBULK ;
            /*0020*/ LDGSTS.E.BYPASS.128 [R7], desc[UR6][R4.64] ;
        Function : never_waits
            /*0000*/ STG.E [R2.64], R1 ;
        Function : takes_hints
            /*0000*/ LDG.E.STRONG.GPU R1, desc[UR4][R2.64] ;
            /*0010*/ ACQBULK ;
            /*0020*/ LDG.E R1, desc[UR4][R2.64] ;
        Function : writes_early
            /*0000*/ LDG.E.STRONG.GPU R1, desc[UR4][R2.64] ;
            /*0010*/ STG.E.STRONG.GPU desc[UR4][R2.64], R1 ;
            /*0020*/ ACQBULK ;
        """,
    )
    assert native_library.early_accesses(LIBRARY) == {"early", "writes_early"}


def test_a_descriptor_in_an_odd_register_is_found(monkeypatch):
    listing(
        monkeypatch,
        """
        Function : odd
            /*0000*/ LDGSTS.E.BYPASS.128 [R61+UR0], desc[UR1][R52.64], !P2 ;
        Function : odd_too
            /*0000*/ STG.E desc[UR13][R52.64], R1 ;
        Function : even
            /*0000*/ LDG.E R18, desc[UR12][R18.64] ;
        """,
    )
    assert native_library.illegal_descriptors(LIBRARY) == {"odd", "odd_too"}
