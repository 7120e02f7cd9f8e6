// SPDX-License-Identifier: Apache-2.0
//
// By which path a product is multiplied: benchmarks/kernel_paths.py writes this file from measurements.

constexpr Rule of_portable[] = {
    {&paths::rows_f32, any_product, {1, 24}},
    {&paths::panels_f32, any_product, {1}},
};

constexpr Rule of_avx2[] = {
    {&paths::in_place_integer, only(one_term | two_terms | decoded), {1, 1}},
    {&paths::in_place_integer, only(blocks_to_64), {1, 1}},
    {&paths::in_place_integer, only(blocks_to_64 | long_blocks | one_term | codes), {1, 2}},
    {&paths::in_place_integer, only(blocks_to_64 | one_term | two_terms | codes), {1, 2}},
    {&paths::in_place_integer, only(blocks_to_16 | blocks_to_64 | codes), {1, 3}},
    {&paths::in_place_integer, only(blocks_to_16 | codes), {1, 6}},
    {&paths::in_place_integer, only(bytes), {1, 6}},
    {&paths::panels_integer, any_product, {1, 32}},
    {&paths::panels_integer, only(blocks_to_64 | long_blocks), {1}},
    {&paths::panels_integer, only(four_bits), {1}},
    {&paths::in_place_f32, any_product, {1, 3}},
    {&paths::in_place_f32, only(blocks_to_64 | long_blocks), {1, 8}},
    {&paths::in_place_f32, only(four_bits), {1, 8}},
    {&paths::rows_f32, any_product, {1, 6}},
    {&paths::rows_f32, only(numbers | three_terms), {1, 8}},
    {&paths::panels_f32, any_product, {1}},
};

constexpr Rule of_avx512[] = {
    {&paths::in_place_integer, only(codes | codes_in_tiles), {1, 2}},
    {&paths::in_place_integer, any_product, {1, 1}},
    {&paths::panels_integer, any_product, {1}},
    {&paths::in_place_f32, any_product, {1, 8}},
    {&paths::rows_f32, any_product, {1, 3}},
    {&paths::panels_f32, any_product, {1}},
};

constexpr Rule of_avx512_bf16[] = {
    {&paths::in_place_integer, only(codes | codes_in_tiles), {1, 4}},
    {&paths::in_place_integer, only(two_terms | three_terms | decoded), {1, 2}},
    {&paths::panels_integer, any_product, {1}},
    {&paths::lanes, only(four_bits | prepared | one_term), {1, 24}},
    {&paths::lanes, only(prepared | one_term), {2, 24}},
    {&paths::lanes, only(prepared | codes | codes_in_tiles), {1, 24}},
    {&paths::lanes, only(prepared | two_terms), {1, 12}},
    {&paths::lanes, only(prepared | three_terms | decoded), {1, 8}},
    {&paths::lanes, only(one_term | codes | codes_in_tiles), {3, 24}},
    {&paths::lanes, only(two_terms), {3, 12}},
    {&paths::lanes, only(three_terms | decoded), {3, 8}},
    {&paths::lanes, only(long_blocks | prepared | one_term | codes | codes_in_tiles), {25, 48}},
    {&paths::lanes, only(prepared | two_terms), {13, 24}},
    {&paths::lanes, only(prepared | three_terms), {9, 16}},
    {&paths::lanes, only(four_bits | three_terms | decoded), {9, 16}},
    {&paths::in_place_bf16, any_product, {1, 8}},
    {&paths::rows_f32, any_product, {1, 3}},
    {&paths::panels_bf16, only(one_term | two_terms | codes | codes_in_tiles), {1}},
    {&paths::panels_f32, any_product, {1}},
};

constexpr Rule of_amx[] = {
    {&paths::in_place_integer, only(codes | codes_in_tiles), {1, 4}},
    {&paths::in_place_integer, any_product, {1, 2}},
    {&paths::panels_integer, only(four_bits | codes_in_tiles), {16}},
    {&paths::panels_integer, only(codes_in_tiles), {17}},
    {&paths::tiles, only(two_terms), {2, 16}},
    {&paths::tiles, only(three_terms), {1, 10}},
    {&paths::tiles, only(one_term | codes | codes_in_tiles), {3, 16}},
    {&paths::tiles, only(decoded), {1, 5}},
    {&paths::lanes, only(four_bits | prepared | one_term), {1, 4}},
    {&paths::lanes, only(prepared | one_term), {2, 4}},
    {&paths::lanes, only(prepared | codes | codes_in_tiles), {1, 4}},
    {&paths::lanes, only(prepared | two_terms), {1, 2}},
    {&paths::lanes, only(prepared | three_terms | decoded), {1, 1}},
    {&paths::lanes, only(one_term | codes | codes_in_tiles), {3, 4}},
    {&paths::in_place_bf16, any_product, {1, 8}},
    {&paths::rows_f32, any_product, {1, 3}},
    {&paths::panels_bf16, any_product, {1}},
    {&paths::panels_f32, any_product, {1}},
};

constexpr Rule of_neon[] = {
    {&paths::in_place_integer, only(codes | codes_in_tiles), {1, 2}},
    {&paths::in_place_integer, any_product, {1, 1}},
    {&paths::panels_integer, any_product, {1}},
    {&paths::in_place_f32, any_product, {1, 4}},
    {&paths::rows_f32, any_product, {1, 3}},
    {&paths::panels_f32, any_product, {1}},
};

constexpr RuleTable tables[] = {
    {"portable", of_portable},
    {"avx2", of_avx2},
    {"avx512", of_avx512},
    {"avx512_bf16", of_avx512_bf16},
    {"amx", of_amx},
    {"neon", of_neon},
};
