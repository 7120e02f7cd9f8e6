// SPDX-License-Identifier: Apache-2.0
//
// The C functions from Rust: a weight (64, 256) in NVFP4, times one row of activations. Against a shared breccia:
//     rustc --edition 2021 -L native=<prefix>/lib -l dylib=breccia_c linear.rs
use std::{ffi::{c_char, c_void, CStr}, mem::size_of, ptr::{null, null_mut}};

#[repr(C)]
#[derive(Clone, Copy)]
struct Matrix { size: usize, recipe: *const c_void, prepared: *const c_void, batch: i64, rows: i64, columns: i64,
    dtype: i32, scale_form: i32, transposed: i32, global_scales: i32,
    data: *const c_void, scale: *const c_void, zero_point: *const c_void, global_scale: *const c_void }
#[repr(C)]
struct Output { size: usize, recipe: *const c_void, batch: i64, rows: i64, columns: i64, dtype: i32, reserved: i32,
    data: *mut c_void, scale: *mut c_void, zero_point: *mut c_void, global_scale: *mut c_void }
#[repr(C)]
struct PartBytes { size: usize, data: i64, scale: i64, zero_point: i64, global_scale: i64 }
extern "C" {
    fn breccia_last_message() -> *const c_char;
    fn breccia_recipe_new(name: *const c_char, fields: *const c_char, recipe: *mut *mut c_void) -> i32;
    fn breccia_recipe_free(recipe: *mut c_void);
    fn breccia_part_sizes(recipe: *const c_void, batch: i64, rows: i64, columns: i64, sizes: *mut PartBytes) -> i32;
    fn breccia_cast(x: *const Matrix, out: *const Output, options: *const c_void) -> i32;
    fn breccia_linear(x: *const Matrix, w: *const Matrix, bias: *const Matrix, out: *const Output,
        options: *const c_void) -> i32;
}

fn check(status: i32) {
    assert!(status == 0, "{}", unsafe { CStr::from_ptr(breccia_last_message()) }.to_string_lossy());
}

fn numbers(data: &[f32], rows: i64, columns: i64) -> Matrix {
    Matrix { size: size_of::<Matrix>(), recipe: null(), prepared: null(), batch: 0, rows, columns, dtype: 0,
        scale_form: 0, transposed: 0, global_scales: 0, data: data.as_ptr().cast(), scale: null(), zero_point: null(),
        global_scale: null() }
}

fn output(recipe: *const c_void, rows: i64, columns: i64, data: *mut c_void) -> Output {
    Output { size: size_of::<Output>(), recipe, batch: 0, rows, columns, dtype: 0, reserved: 0, data,
        scale: null_mut(), zero_point: null_mut(), global_scale: null_mut() }
}

fn main() {
    let (weights, x) = (vec![0.5f32; 64 * 256], vec![1f32; 256]);
    let mut y = vec![0f32; 64];
    let (mut recipe, mut global) = (null_mut(), 0f32);
    let mut sizes = PartBytes { size: size_of::<PartBytes>(), data: 0, scale: 0, zero_point: 0, global_scale: 0 };
    unsafe {
        check(breccia_recipe_new(c"nvfp4".as_ptr(), null(), &mut recipe));
        check(breccia_part_sizes(recipe, 0, 64, 256, &mut sizes));
        let (mut codes, mut scales) = (vec![0u8; sizes.data as usize], vec![0u8; sizes.scale as usize]);
        let q = Output { scale: scales.as_mut_ptr().cast(), global_scale: (&raw mut global).cast(),
            ..output(recipe, 64, 256, codes.as_mut_ptr().cast()) };
        check(breccia_cast(&numbers(&weights, 64, 256), &q, null()));
        let w = Matrix { recipe, data: q.data, scale: q.scale, global_scale: q.global_scale,
            ..numbers(&[], 64, 256) };
        check(breccia_linear(&numbers(&x, 1, 256), &w, null(), &output(null(), 1, 64, y.as_mut_ptr().cast()), null()));
        breccia_recipe_free(recipe);
    }
    println!("{} bytes instead of {}, y[0] = {}", sizes.data + sizes.scale, 4 * weights.len(), y[0]);
    assert!(y.iter().all(|&sum| (sum - 128.0).abs() < 1e-3));
}
