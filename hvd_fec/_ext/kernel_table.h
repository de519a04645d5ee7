/* Included last, once per instruction set, by kernels.c. */
const kernel_set NAME(kernels) = {
    STRING(NAME_SUFFIX),
    NAME(all_finite),
    NAME(fec_encode),
    NAME(fec_check),
    NAME(fec_decode_add),
    NAME(pack_runs),
    NAME(unpack_runs),
    NAME(coded_pack),
    NAME(coded_unpack),
    NAME(coded_add),
    NAME(ternary_survey),
    NAME(ternary_encode),
    NAME(ternary_draw),
    NAME(ternary_decode),
};
